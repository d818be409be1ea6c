"""How energetic GEM's proxy may be: loss and median pi for several kappa, up to divergence.

Figure 8 of the GEM paper, which matches the energy of momentum SGD times kappa (its eq. 27): better
with a larger kappa up to 3, diverging at 4. The paper names no number of workers; its curve of
kappa = 1 is nearest to its curve of 5 workers. At paper scale about 100,000 commits of MNIST's
network: ten minutes on two cores.
"""

from asyncsim.study.comparison import Comparison, final_loss
from asyncsim.study.sweep import preset

Config, SCALES = preset(
    small={"workers": 5, "steps": 200, "methods": ("gem(kappa=[1, 1.5, 2, 2.5, 3, 3.5, 4])",)},
    paper={"problem": "mnist", "steps": 938, "evaluate_every": 469},
)
run = Comparison("kappa", measure=final_loss).run
