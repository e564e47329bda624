"""Plans that learn: prices from recorded steps, plans by them, and the copy of a process that works beside it."""

import json
import os
import random
import signal
import time
from dataclasses import replace

import pytest
from test_wrong_prices import divided
from workloads import blocks, random_workload

from bench.learning import draws, learn, marks_of, recorded, wrong_tasks
from bench.wrong_prices import at_other_prices, on_link, step_of
from fsdp_compile.config import CompileConfig
from fsdp_compile.learning import graphs
from fsdp_compile.learning.child import Child
from fsdp_compile.learning.prices import Called, Mark, Record, Unlike, of_all_ranks, priced_by, records_of
from fsdp_compile.learning.replan import Graph, replanned
from fsdp_compile.passes.plan.plan import Plan, simulate, verify
from fsdp_compile.passes.plan.safe import safe_plan
from fsdp_compile.passes.plan.schedule import alternating, search_plan
from fsdp_compile.passes.plan.workload import smallest_budget

# --- prices -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_a_recorded_step_has_its_prices(seed):
    """Where each task begins with a product, a record has the seconds of each, whatever they were priced; where some
    do not, those between two products share what both take. The link is found too, to a percent.
    """
    rng = random.Random(seed)
    step = on_link(blocks(5, latency=0.01, rng=rng) if seed % 2 else divided(rng, 0.01, False), rng.choice([0.6, 0.9]))
    ratio = rng.choice([0.25, 0.5, 1.0, 2.0, 4.0])
    real = at_other_prices(wrong_tasks(step, rng), 1.0, ratio)
    plan = rng.choice([safe_plan(step).plan, alternating(step)])
    products = [rng.random() < 0.7 or seed < 6 for _ in step.tasks]
    found = recorded(step, plan, products, marks_of(real, plan, products))
    right, at = [task.seconds for task in real.tasks], 0
    assert sum(found.seconds) == pytest.approx(sum(right))
    if seed < 6:
        assert found.seconds == pytest.approx(right)
    cuts = {step.at for step in plan.steps if step.kind != "free"} | {at for at, each in enumerate(products) if each}
    for cut in [*sorted(cuts), len(right)]:
        assert sum(found.seconds[at:cut]) == pytest.approx(sum(right[at:cut]), abs=1e-9)
        at = cut
    assert found.link == pytest.approx(ratio, rel=0.01)
    timeline = simulate(real, plan)
    assert simulate(priced_by(step, found.seconds, found.link), plan).makespan == pytest.approx(
        timeline.makespan, rel=0.01
    )
    assert found.step == pytest.approx(timeline.makespan, rel=1e-6)


def test_products_that_are_not_those_of_the_plan():
    """If another number of products is seen between two collectives than the plan has there, tasks share the time by
    their prices; the sum is right.
    """
    step = on_link(blocks(4), 0.6)
    plan, products = alternating(step), [True] * len(step.tasks)
    marks = marks_of(step, plan, products)
    extra = next(mark for mark in marks if mark.kind == "product")
    found = recorded(step, plan, products, sorted([*marks, extra], key=lambda mark: mark.begin))
    assert sum(found.seconds) == pytest.approx(sum(task.seconds for task in step.tasks))


@pytest.mark.parametrize("change", ["lost", "more", "other"])
def test_collectives_that_are_not_those_of_the_plan(change):
    """A graph that launches or waits for something else than its plan teaches nothing."""
    step = on_link(blocks(4), 0.6)
    plan, products = alternating(step), [True] * len(step.tasks)
    marks = marks_of(step, plan, products)
    at = next(at for at, mark in enumerate(marks) if mark.kind == "wait")
    changed = {
        "lost": [*marks[:at], *marks[at + 1 :]],
        "more": [*marks[:-1], Mark("wait", marks[-1].end, marks[-1].end), marks[-1]],
        "other": [*marks[:at], marks[at]._replace(kind="reduce"), *marks[at + 1 :]],
    }[change]
    with pytest.raises(Unlike, match="expected"):
        recorded(step, plan, products, changed)


def test_waits_for_late_ranks_are_no_price():
    """Waits that no link explains leave the link as it was priced."""
    step = on_link(blocks(6), 0.3)
    plan, products, rng = safe_plan(step).plan, [True] * len(step.tasks), random.Random(0)
    late, marks = 0.0, []
    for mark in marks_of(step, plan, products):
        more = 0.004 * rng.random() * sum(task.seconds for task in step.tasks) if mark.kind.startswith("wait") else 0.0
        marks.append(mark._replace(begin=mark.begin + late, end=mark.end + late + more))
        late += more
    assert 0.5 < recorded(step, plan, products, marks).link < 2.0


@pytest.mark.parametrize("ratio", [0.25, 4.0])
def test_forward_and_backward_have_one_link(ratio):
    """A graph that hides all its collectives, but for waits that no link explains, has the link that another shows."""
    calls, rng = {}, random.Random(0)
    for name, busy in (("forward", 0.9), ("backward", 0.02)):
        step = on_link(blocks(6), busy)
        plan, products = safe_plan(step).plan, [True] * len(step.tasks)
        marks, late = [], 0.0
        for mark in marks_of(at_other_prices(step, 1.0, ratio), plan, products):
            more = 0.002 * rng.random() * busy if mark.kind.startswith("wait") else 0.0
            marks.append(mark._replace(begin=mark.begin + late, end=mark.end + late + more))
            late += more
        calls[name] = Called(step, plan, products, marks)
    assert records_of({"backward": calls["backward"]})["backward"].link == 1.0
    found = records_of(calls)
    assert found["forward"].link == found["backward"].link == pytest.approx(ratio, rel=0.05)


def test_ranks_share_medians_and_the_shortest_link():
    """Tasks take what they take on most ranks; who comes last knows how long a collective takes."""
    records = [Record((1.0, 5.0), 2.0, 1.0, 8.0), Record((2.0, 3.0), 1.5, 2.0, 9.0), Record((9.0, 4.0), 4.0, 3.0, 20.0)]
    assert of_all_ranks(records) == Record((2.0, 4.0), 1.5, 2.0, 9.0)


@pytest.mark.parametrize(
    "table",
    [
        {},
        {"seconds": [1.0], "link": 1.0, "exposed": 0.0, "step": 1.0},
        {"seconds": [1.0, float("nan")], "link": 1.0, "exposed": 0.0, "step": 1.0},
        {"seconds": [1.0, -1.0], "link": 1.0, "exposed": 0.0, "step": 1.0},
        {"seconds": [1.0, 1.0], "link": 0.0, "exposed": 0.0, "step": 1.0},
        {"seconds": "ab", "link": 1.0, "exposed": 0.0, "step": 1.0},
    ],
)
def test_records_that_are_none(table):
    """What others have written is read with care."""
    with pytest.raises((ValueError, TypeError, KeyError)):
        Record.from_json(table, 2)


def test_records_travel():
    """What ranks tell each other is what was recorded, to five digits."""
    record = Record((1.0, 0.123456789), 1.25, 0.5, 2.0)
    read = Record.from_json(json.loads(json.dumps(record.to_json())), 2)
    assert read.seconds == pytest.approx(record.seconds, rel=1e-4) and replace(read, seconds=record.seconds) == record


def test_what_passes_knew_travels():
    """A graph that is found in the compiler's caches is read from what was kept beside them."""
    for seed in range(5):
        step = random_workload(random.Random(seed), 4)
        noted = graphs.Noted(step, alternating(step), tuple(index % 2 == 0 for index in range(len(step.tasks))))
        assert graphs.Noted.from_text(noted.to_text()) == noted
    for text in ("", "{}", "[]", "null", noted.to_text().replace('"gathered"', '"other"')):
        with pytest.raises((ValueError, TypeError, KeyError)):
            graphs.Noted.from_text(text)


# --- plans by them ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seeds", [range(6), pytest.param(range(6, 40), marks=pytest.mark.nightly)])
def test_learned_plans_are_as_good_as_with_the_right_prices(seeds):
    """Tasks take 0.3 to 3 times as long as priced, drawn for each, and the link a quarter or four times: the learned
    plan exposes at most 1.05 times what the plan for the right prices does, and 1 % of the step. No plan on the way is
    more than 1 % longer than the rule.
    """
    for seed in seeds:
        rng = random.Random(seed)
        step = on_link(blocks(5, rng=rng) if seed % 2 else divided(rng, 0.02, False), rng.choice([0.6, 0.9]))
        real = at_other_prices(wrong_tasks(step, rng), 1.0, rng.choice([0.25, 4.0]))
        found = learn(step, real, [True] * len(step.tasks))
        assert found.over <= 0.01 and found.beside_rule <= 0.01, (seed, found)


@pytest.mark.nightly
@pytest.mark.parametrize("model", ["gpt", "llama"])
@pytest.mark.parametrize("ratio", [0.6, 0.9])
def test_learned_plans_of_models(model, ratio):
    """The same for steps of whole models, where some tasks begin without a product."""
    step = on_link(step_of(model), ratio)
    step = replace(step, units=tuple(replace(unit, keep_unsharded=False) for unit in step.units))
    found = draws(step, 20)
    assert max(each.over for each in found) <= 0.01 and max(each.beside_rule for each in found) <= 0.01


@pytest.mark.parametrize("seed", [0, 5, 9, 11])
def test_a_link_that_is_known_to_some_percent(seed):
    """A record by which the link takes 5 % less than it does has a plan that exposes at most 1.05 times what the plan
    for the right link does.
    """
    step = on_link(divided(random.Random(seed), 0.02, False), 0.9)
    record = Record(tuple(task.seconds for task in step.tasks), 1 / 1.05, 0.1, 1.0)
    plan = replanned({"step": Graph(step, alternating(step))}, {"step": record}).plans["step"]
    assert simulate(step, plan).exposed <= 1.05 * simulate(step, search_plan(step).plan).exposed


def test_a_link_that_changes_is_found_again():
    """The plan that has learned a link learns another one, three times as slow."""
    step = on_link(blocks(6), 0.6)
    plan, products = search_plan(step).plan, [True] * len(step.tasks)
    real = at_other_prices(step, 1.0, 3.0)
    record = recorded(step, plan, products, marks_of(real, plan, products))
    assert record.link == pytest.approx(3.0, rel=0.01)
    found = replanned({"step": Graph(step, plan)}, {"step": record})
    after, best = (simulate(real, each).makespan for each in (found.plans["step"], search_plan(real).plan))
    assert after <= best * 1.01


def test_when_a_plan_is_looked_for_again():
    """Not while steps and link take what they took; if one of them takes a third more or less, in one direction too."""
    before = {"forward": {"step": 1.0, "link": 2.0}, "backward": {"step": 2.0, "link": 1.0}}
    near = {"forward": {"step": 1.1, "link": 1.9}, "backward": {"step": 1.9, "link": 1.0}}
    assert graphs._are_alike(near, before) and not graphs._are_alike(near, {})
    for direction in before:
        for name in ("step", "link"):
            for factor in (1.33, 0.75):
                far = {each: dict(figures) for each, figures in before.items()}
                far[direction][name] *= factor
                assert not graphs._are_alike(far, before)


def test_plans_that_do_not_pay():
    """Where prices are right, the plan that runs stays: no other one is 1 % shorter."""
    step = on_link(blocks(6), 0.6)
    plan = search_plan(step).plan
    record = Record(tuple(task.seconds for task in step.tasks), 1.0, 0.0, 1.0)
    assert not replanned({"step": Graph(step, plan)}, {"step": record}).pays


@pytest.mark.parametrize("seed", range(4))
def test_learned_plans_fit(seed):
    """Learned plans are correct, keep the budget and, where memory is not known to be free, need no more than the rule
    or the plan that runs.
    """
    rng = random.Random(seed)
    step = on_link(divided(rng, 0.02, False), 0.9)
    real = wrong_tasks(step, rng)
    record = Record(tuple(task.seconds for task in real.tasks), 1.0, 0.0, 1.0)
    rule = alternating(step)
    budget = (smallest_budget(step) + simulate(step, rule).peak) // 2
    current = search_plan(step, budget).plan
    tight = replanned({"step": Graph(step, current)}, {"step": record}, budget).plans["step"]
    verify(step, tight, budget)
    lean = replanned({"step": Graph(step, rule)}, {"step": record}, is_lean=True).plans["step"]
    verify(step, lean, max(simulate(real, each).peak for each in (rule, alternating(real))))


def test_texts_of_plans_are_files_of_plans(tmp_path):
    """What ranks agree on is read back as the option `plan` reads files."""
    step = blocks(3)
    plans = {"forward": alternating(step), "backward": search_plan(step).plan}
    text = graphs.plan_text(plans)
    (tmp_path / "plan").write_text(text)
    assert [Plan.parse(part.partition(":\n")[2]) for part in text.split("backward:")[0:1]] == [plans["forward"]]
    assert CompileConfig(plan=str(tmp_path / "plan")).file_contents == (text,)


# --- the copy of a process --------------------------------------------------------------------------------------------


def _ended(child: Child) -> str:
    end = time.monotonic() + 20
    while child.status == "compiling" and time.monotonic() < end:
        time.sleep(0.01)
    return child.status


def _fail() -> str:
    raise ValueError("no")


def _end() -> str:
    os._exit(3)


def test_a_copy_works_and_ends(monkeypatch, tmp_path):
    """Its result comes back once; one that fails or is killed says so; none is left."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    child = Child(lambda: "done")
    assert (_ended(child), child.result, child.result) == ("ready", "done", "")
    assert _ended(Child(_fail)) == "failed" and _ended(Child(_end)) == "failed"
    waits = Child(lambda: str(time.sleep(60)))
    assert waits.status == "compiling"
    os.kill(waits._pid, signal.SIGKILL)
    assert _ended(waits) == "failed"
    stopped = Child(lambda: str(time.sleep(60)))
    stopped.stop()
    assert stopped.status == "failed"
    with pytest.raises(ChildProcessError):
        os.waitpid(stopped._pid, os.WNOHANG)


def test_a_copy_has_no_open_files(monkeypatch, tmp_path):
    """A socket of a rank that is killed closes, though its copy lives."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    read, write = os.pipe()
    child = Child(lambda: str(time.sleep(20)))
    time.sleep(0.2)
    os.close(write)
    begin = time.monotonic()
    assert os.read(read, 1) == b"" and time.monotonic() - begin < 10
    child.stop()
    os.close(read)
