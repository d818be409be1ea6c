"""Commands that cannot be followed: each ends with code 2, an error and a hint, and leaves nothing.

What only one study, file or problem can be given wrong, and has to be made first, is in the files
of these.
"""

import pytest

from asyncsim import study

#: What is typed after ``asyncsim study``, and what is in the line.
COMMANDS = """
stalenes | study = 'stalenes': unknown; did you mean 'staleness'? choose from checkpoint,
--list | study = '--list': unknown; did you mean 'claims'? choose from checkpoint,
gem kapa | study = 'kapa': unknown; did you mean 'kappa'?
gem kappa --seeds 0 | seeds = 0: must be at least 1
staleness --sed 3 | Unrecognized options: --sed, 3; Perhaps you meant: --seeds INT
staleness --seeds x | --seeds: 'x' is no INT; --seeds INT
staleness --executor ray local | executor = 'ray local': too many values; asyncsim study staleness
checkpoint --server maybe | server = 'maybe': takes no value; write --server alone
post_training --accelerators 8 | accelerators = '8': too few values; give 2
staleness --protocol x | protocol = 'x': unknown; choose from
staleness --methods gme | methods = 'gme': unknown; did you mean 'gem'? choose from adag, adaptive_staleness,
staleness --methods | methods: none given; choose from
staleness --methods gem,gem | the same name twice
staleness --problem digit | problem = 'digit': unknown; did you mean 'digits'? choose from digits, mnist,
staleness --workers 0 | workers = 0: must be at least 1
staleness --steps 0 | steps = 0: must be at least 1
staleness --seeds 0 | seeds = 0: must be at least 1
staleness --evaluate-every 0 | evaluate_every = 0: must be at least 1
staleness --diagnose-every -1 | diagnose_every = -1: must be at least 0
staleness --learning-rate 0 | learning_rate = 0.0: must be above zero
staleness --learning-rate nan | learning_rate = nan: must be finite
staleness --momentum 1 | error: momentum = 1.0: must be below one
staleness --methods downpour --momentum 1 | error: momentum = 1.0: must be below one
staleness --methods \0x.py:f | methods = '\\x00x.py:f': write FILE.py:FUNCTION for one of your own
staleness --methods mine.py:damped | methods = 'mine.py:damped': there is no file mine.py
staleness --methods gem(kappa=-1) | methods = 'gem(kappa=-1)': kappa = -1: must be zero or above
staleness --methods gem(pi_max=0) | pi_max = 0: must be above zero
staleness --methods gem(kapa=2) | methods = 'gem(kapa=2)': parameter = 'kapa': unknown; did you mean 'kappa'?
staleness --methods gem(kappa=2 | 'gem(kappa=2': not a method; write for example gem(
staleness --methods gem(0.1,0.9,1,5,paper,3) | 6 parameters given; write gem(learning_rate=0.05,
staleness --methods gem(kappa=[1]*1000000) | 1,000,000 combinations of values; give 1 to 1,000
staleness --methods gem(kappa=[]) | 0 combinations of values; give 1 to 1,000
staleness --methods 3 | methods = '3': not a method; write a name, and its arguments in brackets
staleness --problem mnist(data_dir=/x) | not a problem; write for example digits(batch_size=8); texts that
staleness --compute 0 | compute = constant(value=0): must have a mean above zero and finite
staleness --compute -1 | compute = '-1': law constant: value = -1: must be zero or above (seconds)
staleness --compute gama(mean=1,cv=1) | did you mean 'gamma(mean, cv)'? choose from constant(value),
staleness --compute gamma( | compute = 'gamma('
staleness --compute [1]*3 | compute = a list of 3 laws: must hold one law per worker, and there are 100
staleness --service pareto(mean=1,shape=0.5) | service = 'pareto(mean=1,shape=0.5)': law pareto: shape = 0.5
staleness --latency -1 | latency = '-1': law constant: value = -1: must be zero or above (seconds)
staleness --latency [1,2,3] | latency = a list of 3 laws: must be one law, or a pair
staleness --bandwidth 0 | bandwidth = 0.0: must be above zero (bytes/s)
staleness --bandwidth 100Mbps | bandwidth = '100Mbps': unknown unit 'Mbps'; choose from B/s, kB/s
staleness --latency 40msec | unknown unit 'msec'; choose from ns, us, ms, s, min, h
staleness --sites 16 16 | sites = 16, 16: have 32 workers, and workers = 100; let both agree
staleness --far-latency 1 | far_latency = 1: is between sites, and there is one; give sites,
staleness --message-bytes 9 | message_bytes = 9: takes no time without a bandwidth; give bandwidth as well
staleness --bandwidth 9 --message-bytes [1, | message_bytes = '[1,': must be a number, or one with a unit such as
staleness --shared-bandwidth | shared_bandwidth = True: there is no bandwidth to share; give bandwidth
staleness --batch-size 0 | batch_size = 0: must be at least 1
staleness --batch-size 100000 | batch_size = 100000: train has only 1437 examples
staleness --workers 1500 --steps 1 --problem digits(1,split=even) | the smallest of 1500 parts
staleness --workers 1500 --steps 1 --problem digits(1,split=1) | the smallest of 1500 parts has 0 examples; use
staleness --problem digits(split=-1) | split = -1: must be above zero
staleness --problem quadratic(curvature=[-1]) | curvature = [-1]: must be a list of eigenvalues above
staleness --problem quadratic(noise=-1) | noise = -1: must be zero or above
staleness --problem mnist(dropout=1) | dropout = 1: must be below one
staleness --problem mnist(data_dir='nowhere') | no such file; supply the standard file
staleness --out= | --out: path = '': is empty; give the name of a file or folder
ensembles --out= --workers 2 | --out: path = '': is empty
staleness --out /dev/null | out = '/dev/null': exists and is not an empty folder; give another
staleness --out /dev/null/x | out = '/dev/null/x': cannot be written: Not a directory; give a folder
stability --workers 5 5 | workers = 5, 5: one comes twice; give each once
stability --workers 0 | workers = 0: must be at least 1
stability --learning-rate 0.1 0 | learning_rate = 0.0: must be above zero
stability --learning-rate 0.1 0.1 | learning_rate = 0.1, 0.1: one comes twice
kappa --methods gem(kappa=[1,-1]) | kappa = -1: must be zero or above
speedup --workers 3 | workers = 3: cannot divide a batch of 256; give numbers that do
speedup --time-budget 0 | time_budget = 0.0: must be above zero
speedup --batch-size 8 | batch_size = 8: follows from the number of workers; leave it out
speedup --workers 2 --compute [1]*2 | compute = '[1]*2': must be one law, not a list of 2
speedup --steps -1 | steps = -1: must be at least 1
speedup --methods sgd --workers 2 4 | methods = sgd: none can be run here
generalization --epochs 0 | epochs = 0.0: must be above zero
generalization --problem quadratic | problem = 'quadratic': has no test data to generalize to; choose another
forensics --protocol exchange exchange | protocol = exchange, exchange: one comes twice; give each once
forensics --problem quadratic | problem = 'quadratic': has no published curves; give mnist
energy --diagnose-every 0 | diagnose_every = 0
energy --no-diagnose-energy | diagnose_energy = False
tensors --diagnose-every 0 | diagnose_every = 0
tensors --effective-batch 9 | effective_batch = 9: cannot be shared evenly by 8 workers
tensors --effective-batch 16 --batch-size 4 | not both
tensors --methods downpour | methods = 'downpour': has no diagnostic pi, which this study measures; choose gem
momentum --workers 1 2 | workers = 1
momentum --seeds 2 | seeds = 2: must be at least 3
momentum --step 2 | step = 2.0: must be below the fewest workers, 2
momentum --problem mnist | problem = 'mnist'
momentum --protocol write_then_read | protocol = 'write_then_read'
momentum --policy buffered(2) | policy = 'buffered(2)'
momentum --learning-rate 0.7 | learning_rate = 0.7: follows from step
momentum --optimizer adam --window 2 | optimizer = 'adam': with a window above one
momentum --methods aeasgd | workers of 'aeasgd' do not read every version of the central variable
momentum --methods dana_zero | workers of 'dana_zero' do not read every version
momentum --methods softsync | workers of 'softsync' do not read every version
momentum --compute nonsense(1) | nonsense
momentum --compute constant(1) constant(1) | compute = constant(1), constant(1): one comes twice; give each
windows --window 5 5 | window = 5, 5: one comes twice
windows --window 0 | window = 0: must be at least 1
windows --epochs 0 | epochs = 0.0: must be above zero
windows --problem quadratic | problem = 'quadratic': has no accuracy
windows --optimizer adm | optimizer = 'adm': unknown; did you mean 'adam'?
leaders --window 3 | window = 3: must divide gradients = 512
leaders --gradients 0 | gradients = 0
leaders --group-size 0 | group_size = 0
leaders --local-momentum 1.0 | local_momentum = 1
leaders --weight-decay -1.0 | weight_decay = -1
leaders --optimizer adam --local-momentum 0.5 | optimizer = 'adam': local_momentum = 0.5 and weight_decay = 0
leaders --target 0.0 | target = 0
staleness --failures crush(3,1) | failures = 'crush(3,1)': unknown; did you mean 'crash(
staleness --failures crash(3) | lasts missing; write crash(every, lasts, detect=0
staleness --failures crash(3,1,workers=[0,9]) --workers 4 | failure crash: workers = 9: they are numbered from 0 to 3
staleness --failures crash(3,1,site=1) | site = 1: the cluster has no sites; give workers instead
staleness --failures loss(1,2) | failure loss: probability = 1: must be below one
staleness --failures leave(3) | failures: all workers leave; keep one, or let one join later
staleness --failures outage(3,1) outage(4,1) | failures: two outages of one server
staleness --servers 4 --animate | animate = True: needs all parameters at one instant, and with servers = 4
checkpoint --saving 2h | saving = '2h': is as long as every = '30 min'
delays pipeline --stages 9 | stages = 9: must be from 1 to 4, as the problem has 4 layers
delays pipeline --delays 5 | delays = 5: with 4 stages the pipeline's has no whole numbers
delays pipeline --delays 4 | of versions; give a multiple of 3
delays pipeline --stages 1 | stages = 1: one stage has nothing to compare; give 2 or more
delays pipeline --methods downpour(learning_rate=0.1) | its rate is tuned; leave it out, and give --tune
delays pipeline --groups 0 1 | groups: the tensor 2.bias is in no group; add it to one
failures --deaths 0 0 | deaths = 0.0, 0.0: one comes twice
failures --detect -1 | detect = -1.0: must be zero or above
policies --methods rennala | methods = rennala: requires a certain timing, but this study compares policies
policies --methods sgd | methods = sgd: requires a certain timing
policies --methods dana_zero --window 2 | methods = dana_zero: requires a certain timing
policies --policy | policy: none given
policies --window 2 2 | window = 2, 2: one comes twice
policies --tune | tune: none given
policies --policy barrier barrier | policy = barrier, barrier: one comes twice
policies --policy barrier(3) barrier(count=3) | policy = barrier(3), barrier(count=3): one comes twice
policies --policy barrier(5) --workers 4 | policy
policies --policy buckets(5) --workers 4 | buckets(count=5): some buckets would have no worker, and there are 4
policies --policy bariers | policy = 'bariers': unknown; did you mean
policies --policy barrier(3,collective=ring) | count = 3: an all-reduce has the messages of all workers
policies --policy barrier(collective=ring) --service 1 | an all-reduce has no server; leave service out
policies --policy barrier(collective=tre) | collective = 'tre': unknown; did you mean 'tree'?
staleness --workers 4 --sites 2 2 --far-latency [[0,1],[1]] | far_latency = 2 rows of 2, 1 entries: must be square
staleness --workers 4 --sites 2 2 --far-latency [[1,1],[1,0]] | far_latency[0][0] = 1: must be 0, as latency holds
staleness --workers 4 --sites 1 1 2 --far-latency [[0,40ms],[40ms,0]] | a matrix of 2 sites: there are 3 sites
gossip --workers 4 --sites 2 2 --far-latency [[0,1],[1,0]] | far_latency = a matrix of 2 sites: needs a server
scaling --nodes 4 4 | nodes = 4, 4: one comes twice
scaling --nodes 0 | nodes = 0: must be at least 1
scaling --nodes 4 1000000000001 | nodes = 1000000000001: must be at most 1,000,000,000,000
failures --workers 3000000000 | workers = 3000000000: a cluster of so many needs at least 2.79e+03 GiB of memory
gossip --workers 3000000000 | workers = 3000000000: a cluster of so many needs at least 2.79e+03 GiB of memory
scaling --bucket -3MB | bucket = -3000000.0: must be above zero (bytes)
scaling --bandwidth 0 | bandwidth = 0.0: must be above zero (bytes/s)
scaling --overlap 2 | overlap = 2: is a part; give at most 1
plan --gradients 9 --hours 1 | gradients and hours: there is one horizon; give one of versions, gradients and hours
plan --versions 0 | versions = 0.0: must be above zero
plan --shared-bandwidth | shared_bandwidth = True: there is no bandwidth to share; give bandwidth
plan --policy asynchronous --collective ring | no combination is possible: collective: an all-reduce needs a barrier
plan --collective rings | collective = 'rings': unknown; did you mean 'ring'?
plan --compression 0.5 | compression = 0.5: the size of messages is not known; give model_parameters
plan --compression gem --model-parameters 9 | compression = gem: compresses no messages; give none, 0.25 or
plan --compression 2 --model-parameters 9 | compression = 2: a share of the bytes must be above zero and at most one
plan --model-parameters 9 --message-bytes 9 --bandwidth 9 | message_bytes: follows from model_parameters
plan --window 2 2 | window = 2, 2: one comes twice
plan --recording nowhere.parquet | recording = 'nowhere.parquet': there is no such file
plan --replay -1 | replay = -1: must be at least 0
plan --price -1 | price = -1.0: must be zero or above
plan --sites 3 3 --workers 5 | sites = 3, 3: have 6 workers, and workers = 5
policies --target 0.0 | target = 0.0: must be above zero
policies --problem quadratic --target-of test_accuracy | target_of = 'test_accuracy': unknown; choose
delays best_momentum --methods gem | methods =
delays best_momentum --server-momentum 0.5 1.0 | server_momentum = 1.0: must be above -1 and below 1
delays best_momentum --server-momentum 0.5 0.5 | each once
delays best_momentum --server-momentum | one or more
delays best_momentum --tune 0.1 -1.0 | tune = -1.0
delays best_momentum --gradients 0 | gradients = 0
delays outer_momentum --methods gem | methods =
delays outer_momentum --server-momentum 0.0 0.9 | server_momentum = 0.0: must be above 0 and below 1
delays outer_momentum --server-momentum | one or more
delays outer_momentum --delays -1 | delays = -1
delays outer_momentum --tune 0.1 0.1 | tune = 0.1, 0.1: one comes twice
delays optimizers --methods gem | methods =
delays optimizers --optimizers adam | optimizers = 'adam': unknown; did you mean 'adamw_95'? choose
delays optimizers --delays 1 2 | losses are relative to a delay of 0
delays optimizers --stages 9 | stages = 9
delays optimizers --stages 0 | stages = 0
delays optimizers --gradients 0 | gradients = 0
delays optimizers --problem quadratic --sources fixed | muon
staleness --workers 8 --methods robust(rule=krum(f=3)) | the largest for 8 messages is f = 2
staleness --workers 8 --attack zero(workers=9) | worker 8 is outside the cluster
staleness --workers 8 --attack gem | attack = 'gem': unknown; choose
robustness --byzantine 15 | all 15 workers are Byzantine
robustness --byzantine 16 | worker 15 is outside the cluster
robustness --tune -1.0 | tune = -1.0: must be above zero
robustness --rules krun | rule = 'krun'
robustness --attack alie(workers=3) | leave them out
robustness --policy asynchronous | policy = 'asynchronous()': a version needs several messages
replicas --tune 0.1 0.1 | tune = 0.1, 0.1: one comes twice
replicas --tune -1.0 | tune = -1.0: must be above zero
replicas --target 1.5 | target = 1.5: an accuracy is at most 1
compare --target 0.0 | target =
compare --target 1.5 --target-of test_accuracy | target =
compare --target-of test_accuracy --problem quadratic | target_of =
compare --tune 0.1 -1.0 | tune =
compare --tune 0.1 0.1 | tune =
compare --tune | tune: none given; give one or more learning rates
compare --hold -1 | hold = -1
compare --time-budget 0.0 | time_budget = 0.0: must be above zero
compare --time-budget 3 --epochs 2 | time_budget = 3.0: is a length, and so is epochs; give one
compare --window 4 4 | window = 4, 4: one comes twice
compare --methods | methods: none given
compare --measure test_accuracy --target 1.5 | target = 1.5: an accuracy is at most 1
compare --measure test_loss --problem quadratic | measure =
compare --measure accuracy | measure =
gossip --split | split: none given; give one or more
gossip --split 0.1 -1 | split = -1.0: must be above zero
gossip --split 0.1 0.1 | split = 0.1, 0.1: one comes twice
gossip --split 0.1 --problem quadratic | split = 0.1: problem = 'quadratic' says its own, or cannot be
gossip --split none 0.1 --problem digits(split=0.1) | split = none: problem = 'digits(split=0.1)'
compare --methods dpsgd | or run the study gossip
gossip --topology rnig() | topology = 'rnig()': unknown; did you mean 'ring()'
gossip --topology | topology: none given
gossip --topology ring ring() | one comes twice
gossip --tune 0.1 -1.0 | tune = -1
gossip --target 1.5 | target = 1.5: an accuracy is at most 1
gossip --discipline random | there is no server; leave discipline out
gossip --methods downpour --topology ring() | none can be run on topology
gossip --slow-link 0 | slow_link = 0.0: must be above zero
gossip --slow-link 5 | its links take no time, so that none can be slow; give latency
gossip --topology slow_links(ring(),[[0,9,5]]) --workers 4 --latency 1 | there is no link between 0 and 9
real --topology rnig() | topology = 'rnig()': unknown; did you mean 'ring()'?
real --topology ring() --extrapolate | extrapolate = True: needs a server
real --topology ring() --service 0.1 | there is no server; leave service out
compare --seeds 0 | seeds =
staleness --address auto | address = 'auto': is an option of --executor ray; add that
staleness --cpus-per-run 2 | cpus_per_run = 2: is an option of --executor ray; add that
staleness --accelerators-per-run 1 | accelerators_per_run = 1.0: is an option of --executor ray; add that
staleness --cpus-per-run 0 | cpus_per_run = 0: must be at least 1
staleness --executor ray --accelerators-per-run 1.5 | accelerators_per_run = 1.5: above one it must be a whole
throughput --tasks=mnist | tasks = 'mnist': unknown;
throughput --tasks | tasks: none given; choose from trace, quadratic, digits, cnn
throughput --tasks trace trace | tasks = trace, trace: one comes twice; give each once
throughput --methods=sgd | methods = 'sgd': unknown;
throughput --methods | methods: none given; give at least one
throughput --workers 0 | workers = 0: must be at least 1
throughput --workers | workers: none given; give at least one number
throughput --workers 3 3 | workers = 3, 3: one comes twice; give each once
throughput --repeats=0 | repeats = 0: must be at least 1
throughput --seconds=0 | seconds = 0.0: must be above zero (s)
claims gem gim | lists = 'gim': unknown; choose from 'gem',
claims gem gem | lists = gem, gem: one comes twice; give each once
post_training --queues pase(1) | queues = 'pase(1)': unknown; did you mean 'pace(eta)'?
post_training --queues pace | queues = 'pace': eta missing; write pace(eta)
post_training --queues keep keep | queues = keep, keep: one comes twice
post_training --corrections trunc | correction = 'trunc': unknown; did you mean 'truncated(cap=2)'?
post_training --target nan | target = nan: must be finite
post_training --seeds 1000000000 | seeds = 1000000000: must be at most 100,000
post_training --split 1000000 | split = 1000000: must be at most 1,000
post_training --split 1 | split = 1: one accelerator cannot be divided
post_training --inner-steps 3 | inner_steps = 3: does not divide
post_training --batch 9 --group 2 | batch = 9: is no multiple of group = 2
post_training --tune | tune: none given
post_training --problem digits | problem = 'digits': unknown
post_training --failures crash(9,1) | hits slots or learners?
post_training --recording none.csv | recording = 'none.csv': there is no such file
"""


@pytest.mark.parametrize("command", COMMANDS.strip().splitlines())
def test_bad_input_is_an_error_and_a_hint_and_leaves_nothing(
    command, tmp_path, monkeypatch, capsys
):
    typed, message = command.split(" | ")
    monkeypatch.setattr("asyncsim.study.config.find_spec", lambda name: True)  # Ray is there
    code = study.main(typed.split(" "))
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if not line.startswith("note: ")]
    assert (code, out, [line.partition(": ")[0] for line in lines]) == (2, "", ["error", "hint"]), (
        err
    )
    error, hint = (line.partition(": ")[2] for line in lines)
    assert message.removeprefix("error: ") in f"{error}; {hint}"
    assert list(tmp_path.iterdir()) == []
