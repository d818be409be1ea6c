"""``python -m asyncsim`` says what there is to start: the studies."""

from asyncsim.study.command import overview

if __name__ == "__main__":
    print(overview())
