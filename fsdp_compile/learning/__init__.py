"""Plans that learn: seconds of one recorded step are the prices of the next plan (docs/plans.md, How a plan learns).

    prices      what a recorded step says about tasks and link; what ranks make of their records together
    replan      the plan that these prices ask for, beside the one that runs
    recorder    the clock: when collectives are launched and waited for, and when matrix products begin
    meeting     ranks leave messages for each other at a numbered call, and all of them read all
    graphs      the calls of a compiled graph: recorded, planned again, tried, and kept or taken back
    install     where torch's compiler comes by

A layer: nothing of the runtime or the passes imports it.
"""
