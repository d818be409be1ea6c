"""Pages: a finished study, and the motion of its workers, as HTML that needs no network."""
