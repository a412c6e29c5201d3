"""lab: the experiment on what PPO's lead is made of, its registration, its paired tests, and its page."""

import json
import random
import re
import shlex
import shutil
from collections import Counter

import numpy as np
import pytest

import dr_grpo
import lead
import ppo
import registry
import report
import run
import tasks
from common.harness.command_line import parse_args
from common.harness.data import PromptSampler
from common.tiny_hard import build
from testbed import ROOT

pytestmark = pytest.mark.needs("scipy")
DIGEST = "3416e0181176bd1c0429f1409495d732d0daeaa962ca5871696ee31019c48185"  # of registered_lead.json: it is not edited
REGISTERED = json.loads(lead.LEAD.read_text(encoding="utf-8"))
BASES, ARMS = list(REGISTERED["seeds"]), list(REGISTERED["arms"])
RATES = ("1e-4", "1.5e-4", "2e-4", "3e-4")


# --- what is registered ---


def test_the_registration_is_not_edited():
    before = registry.REGISTERED, registry.RESULTS
    with registry.using(lead.LEAD):
        assert registry.digest() == DIGEST and registry.RESULTS == registry.HERE / "results" / "lead"
    assert (registry.REGISTERED, registry.RESULTS) == before
    with registry.using(registry.REGISTERED):
        assert (registry.REGISTERED, registry.RESULTS) == before


def test_four_arms_are_run_twice_on_twelve_base_models_and_tuned_alike_on_three_others():
    jobs = registry.jobs(REGISTERED)
    deciding = [job for base in BASES for job in lead.jobs_of(REGISTERED, base)]
    assert len(deciding) == 96 and jobs == lead.tuning_jobs(REGISTERED) + deciding and len(jobs) == len(set(jobs))
    assert {*tasks.DECIDING} == {*BASES} and REGISTERED["tuning"]["seeds"] == list(tasks.TUNING.values())
    seeds = [seed for of_base in REGISTERED["seeds"].values() for seed in of_base]
    others = {*registry.load()["tuning"]["seeds"], *(seed for _, seed in registry.jobs(registry.load()))}
    assert len({*seeds, *REGISTERED["tuning"]["seeds"]}) == 24 + 3 and not others & {*seeds, *tasks.TUNING.values()}
    for arm in ARMS:
        names = [f"tune-{arm}-lr_{rate}" for rate in RATES]
        first = REGISTERED["runs"][names[0]]
        for name, rate in zip(names, RATES, strict=True):
            assert REGISTERED["runs"][name] == first.replace("--learning_rate 1e-4", f"--learning_rate {rate}")
        assert {(name, seed) for name in names for seed in tasks.TUNING.values()} <= {*jobs}
        for base in BASES:
            assert REGISTERED["runs"][f"{arm}-{base}"] == {"best_of": names, "task": f"{{{base}}}"}


def command(name, rate="1.5e-4"):
    """The command of a run, of a deciding one with the rate that is the best in the made-up rows."""
    entry = REGISTERED["runs"][name]
    if isinstance(entry, dict):
        [best] = [it for it in entry["best_of"] if it.endswith(f"_{rate}")]
        entry = REGISTERED["runs"][best].replace("{hard}", entry["task"])
    for word, text in REGISTERED["options"].items():
        entry = entry.replace(word, text)
    return entry


def arguments(arm):
    """The options of an arm as its script reads them."""
    script, *options = shlex.split(command(f"{arm}-hard-301"))
    return parse_args({"ppo.py": ppo.Args, "dr_grpo.py": dr_grpo.Args}[script], options)


def test_all_arms_draw_the_same_prompts_as_often():
    counts, drawn = {}, {}
    for arm in ARMS:
        args, sampler = arguments(arm), PromptSampler(range(build.TRAIN_PROBLEMS), 3010)
        drawn[arm] = [sampler.draw(args.prompts_per_step) for _ in range(args.max_steps)]
        counts[arm] = Counter(i for step in drawn[arm] for i in step for _ in range(args.group_size))
    assert all(found == dict.fromkeys(range(512), 40) for found in counts.values())
    assert drawn["dr_grpo"] == drawn["ppo-32x8"] and drawn["ppo-256x1"] == drawn["ppo-256x1-critic_still"]


def test_arms_differ_in_what_the_page_says_and_in_nothing_else():
    found = {arm: vars(arguments(arm)) for arm in ARMS}

    def different(one, other):
        return {name for name in found[one] if name in found[other] and found[one][name] != found[other][name]}

    assert different("ppo-32x8", "ppo-256x1") == {"prompts_per_step", "group_size"}
    assert different("ppo-256x1", "ppo-256x1-critic_still") == {"critic_learning_rate"}
    assert different("ppo-32x8", "dr_grpo") == {"normalize_std", "std_eps"}
    assert found["ppo-256x1"]["critic_learning_rate"] == 1e-3
    shared = ("prompts_per_step", "group_size", "num_minibatches", "num_epochs", "max_steps", "max_new_tokens")
    assert [found["dr_grpo"][name] for name in shared] == [32, 8, 4, 1, 80, 128]


def test_problems_are_the_registered_ones_and_the_tuning_meets_none_that_decide(monkeypatch, tmp_path):
    monkeypatch.setattr(tasks, "FOLDER", tmp_path)
    held_out = {}
    for task in (*tasks.TUNING, *tasks.DECIDING):
        for name, rows in zip(("train", "test"), build.make_lists(random.Random(tasks.BUILT[task])), strict=True):
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (tmp_path / f"{name}.jsonl").write_text(text, encoding="utf-8", newline="\n")
            assert run.sha256(tmp_path / f"{name}.jsonl") == REGISTERED["files"][f"runs/lab/{task}/{name}.jsonl"]
        tasks.write_held_out(task, tmp_path)
        path = tmp_path / f"held_out-{task}.jsonl"
        assert run.sha256(path) == REGISTERED["files"][f"runs/lab/held_out-{task}.jsonl"]
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        held_out[task] = {row["question"] for row in rows if row["difficulty"] != "easy"}
        assert len(rows) == 1582 and not {row["question"] for row in rows} & tasks.questions(tmp_path)
    decided = set().union(*(held_out[task] for task in tasks.DECIDING))
    assert not any(held_out[task] & decided for task in tasks.TUNING)


def test_what_was_known_is_in_the_rows_of_the_claims():
    effect = {"metric": "accuracy", "over": "end"}
    for known in REGISTERED["known"]["effects"]:
        sides = []
        for name, count in zip((known["run"], known["against"]), known["runs"], strict=True):
            seeds = [seed for seed in range(40, 53) if registry.result(name, seed).exists()]
            assert len(seeds) == count
            sides.append([registry.outcome(name, seed, effect) for seed in seeds])
        ends = lead.decide.stats.ttest_ind(*sides, equal_var=False).confidence_interval()
        found = [np.mean(sides[0]) - np.mean(sides[1]), ends.low, ends.high]
        assert found == pytest.approx([known["effect"], known["low"], known["high"]], abs=0.0005)


# --- the statistics ---


def test_a_paired_t_by_hand():
    found = lead.paired([1.0, 2.0, 6.0], 0.0, 4.0)
    error = 7**0.5 / 3**0.5  # the variance is 7
    assert found.effect == 3
    assert found.p == pytest.approx(2 * lead.decide.stats.t.sf(3 / error, 2))
    assert found.p_same == pytest.approx(lead.decide.stats.t.sf(1 / error, 2))  # the effect is 1 below the margin
    width = lead.decide.stats.t.isf(0.025, 2) * error
    assert (found.low, found.high) == pytest.approx((3 - width, 3 + width)) and found.p_signs == 0.25
    assert lead.paired([1.0, 2.0, 6.0], 3.0, 4.0).p == 1


def test_no_deviation_and_no_value_are_no_test():
    for differences in ([0.1, 0.1, 0.1], [0.1, np.nan, 0.2]):
        found = lead.paired(differences, 0.0, 0.02)
        assert found.p == found.p_same == found.p_signs == 1 and np.isnan(found.low)


def test_the_power_that_is_registered_is_that_of_its_plan():
    assert lead.planned(REGISTERED) == REGISTERED["power"]
    assert REGISTERED["power"]["equivalent_at_0"] == 0.73 and REGISTERED["power"]["seen"]["0.026"] == 0.95


def test_power_is_what_simulated_experiments_have():
    """Two runs of each arm on twelve base models, whose own accuracies vary and do not matter."""
    rng, shape = np.random.default_rng(0), (4000, 12)
    base, true = rng.normal(0.6, 0.05, shape), rng.normal(0.0, 0.010, shape)
    mine, others = (rng.normal(0, 0.018, (*shape, 2)).mean(axis=2) + base for _ in range(2))
    differences, test = mine + true - others, lead.decide.stats.ttest_1samp
    seen = (test(differences + 0.026, 0, axis=1).pvalue < 0.025).mean()
    below, above = (test(differences, side * 0.02, axis=1, alternative=name).pvalue
                    for side, name in ((1, "less"), (-1, "greater")))  # fmt: skip
    of_one = lead.deviation(0.018, 0.010, 2)
    assert seen == pytest.approx(lead.power(0.026, of_one, 12, 0.025), abs=0.015)
    same = (np.maximum(below, above) < 0.025).mean()
    assert same == pytest.approx(lead.power_of_equivalence(0.02, of_one, 12, 0.025), abs=0.025)


# --- what decides, from made-up rows ---

NOISE = np.random.default_rng(1).normal(0, 0.01, (len(ARMS), len(BASES), 2))
LEVELS = {"dr_grpo": 0.60, "ppo-32x8": 0.60, "ppo-256x1": 0.65, "ppo-256x1-critic_still": 0.62}


@pytest.fixture
def rows(tmp_path, monkeypatch):
    """A function that writes made-up rows, all of which count; what is registered is what is registered."""
    monkeypatch.setattr(registry, "AMENDMENTS", tmp_path / "amendments.json")
    monkeypatch.setattr(lead, "LEAD", tmp_path / "registered_lead.json")
    shutil.copy(ROOT / "lab/registered_lead.json", lead.LEAD)

    def write(name, seed, accuracy, **other):
        header = {"registered": registry.digest(), "clean": True, "started": "2026-12-01T00:00:00+00:00"}
        header["command"] = f"python {command(name)} --seed {seed}"
        header |= {"code": "c0de", "torch": "2", "transformers": "5", "base": "weights", "commit": "0123456789"} | other
        end = {"step": 80, "completions": 20480} | {f"eval/logged/{kind}": accuracy for kind in registry.SHARES}
        run.write(registry.result(name, seed), [header, {"step": 0, "completions": 0}, end])

    def tune():
        for i, (name, seed) in enumerate(lead.tuning_jobs(REGISTERED)):
            write(name, seed, 0.5 + (0.1 if name.endswith("1.5e-4") else 0.001 * (i % 3)))

    def decide(bases=BASES, levels=LEVELS):
        for arm, noise in zip(ARMS, NOISE, strict=True):
            for base, pair in zip(BASES, noise, strict=True):
                for seed, it in zip(REGISTERED["seeds"][base], pair, strict=True) if base in bases else ():
                    write(f"{arm}-{base}", seed, 0.05 * (BASES.index(base) % 3) + levels[arm] + it)

    with registry.using(lead.LEAD):
        yield type(
            "Rows", (), {"write": staticmethod(write), "tune": staticmethod(tune), "decide": staticmethod(decide)}
        )


def decisions():
    return lead.decisions(REGISTERED, lead.deciding(REGISTERED, lead.counting(REGISTERED)))


def verdicts():
    found = decisions()
    return [found[effect["name"]].verdict for effect in REGISTERED["effects"]]


def page():
    """The part of the page of the claims, which is made beside their registration."""
    with registry.using(registry.HERE / "registered.json"):
        return lead.build()


def test_nothing_is_decided_or_shown_before_all_runs_are_there(rows):
    assert verdicts() == [registry.OPEN] * 2
    assert "**0 of 96 deciding runs are made**, and 0 of 48 of the tuning. Nothing is decided yet." in page()
    assert "| tuning |" not in page()
    rows.tune()
    rows.decide(BASES[:-1])
    for arm in ARMS[:-1]:
        for seed in REGISTERED["seeds"][BASES[-1]]:
            rows.write(f"{arm}-{BASES[-1]}", seed, 0.6)
    assert verdicts() == [registry.OPEN] * 2
    text = page()
    assert "**94 of 96 deciding runs are made**, and 48 of 48 of the tuning. Nothing is decided yet." in text
    assert "| Dr. GRPO | 1e-4: 0.501 | **1.5e-4: 0.600** |" in text and "| verdict |" not in text
    assert "git worktree add --detach ../lead-runs" in text and "Afterwards `lab/results/lead` is copied" in text


def test_effects_are_paired_over_base_models_and_corrected_for_both(rows):
    rows.tune()
    rows.decide()
    found = decisions()
    assert [it.verdict for it in found.values()] == [registry.SAME, registry.HOLDS]
    means = {arm: NOISE[i].mean(axis=1) + LEVELS[arm] for i, arm in enumerate(ARMS)}
    first, second = means["ppo-32x8"] - means["dr_grpo"], means["ppo-256x1"] - means["ppo-32x8"]
    test = lead.decide.stats.ttest_1samp
    assert found["same_shape"].measured.effect == pytest.approx(first.mean(), abs=1e-6)
    assert found["more_prompts"].p == pytest.approx(2 * test(second, 0).pvalue, rel=1e-3)
    assert found["same_shape"].p == pytest.approx(test(first, 0).pvalue, rel=1e-3)  # the greater of the two
    same = max(test(first, 0.02, alternative="less").pvalue, test(first, -0.02, alternative="greater").pvalue)
    assert found["same_shape"].p_same == pytest.approx(2 * same, rel=1e-3) and 2 * same < 0.05
    text = page()
    assert "**96 of 96 deciding runs are made**" in text and "The verdicts stand below." in text
    assert "Over 12 base models. Held-out accuracy: Dr. GRPO: 0.6" in text
    assert f"| **equivalent: smaller than 0.02** | {lead.interval(found['same_shape'].measured)} |" in text
    assert f"| **holds** | {lead.interval(found['more_prompts'].measured)} |" in text
    assert "a critic that learns nothing, less Dr. GRPO | | +0.0" in text
    assert "git worktree add --detach ../lead-runs" in text and "Afterwards" not in text
    assert "has two parts" not in text  # one of the effects does not hold


def test_a_difference_that_is_there_and_small_is_said_to_be_both(rows):
    rows.tune()
    rows.decide(levels=LEVELS | {"dr_grpo": 0.589})
    assert verdicts()[0] == registry.HOLDS and "| **holds, and smaller than 0.02** | +0.0" in page()
    second = decisions()["more_prompts"].measured.effect
    assert f"has two parts**: {second:.3f} for 256 distinct prompts in a step, and\n" in page()
    rows.decide(levels=LEVELS | {"ppo-256x1": 0.5})
    assert verdicts() == [registry.SAME, registry.FAILS]


def test_a_run_that_failed_counts_with_0(rows):
    rows.tune()
    rows.decide()
    rows.write("dr_grpo-hard-301", 3010, 0.6, failed="loss nan: not finite")
    values = lead.means(REGISTERED, "dr_grpo", BASES, REGISTERED["outcome"])
    assert values[0] == pytest.approx((0.6 + NOISE[0][0][1]) / 2, abs=1e-6) and verdicts()[0] == registry.UNSEEN


@pytest.mark.parametrize(
    ("other", "made"),
    [
        ({"code": "another"}, 96),
        ({"torch": "3"}, 96),
        ({"base": "other weights"}, 96),
        ({"started": "2027-06-01T00:00:00+00:00"}, 95),
    ],
)
def test_a_run_that_is_not_what_was_registered_decides_nothing(rows, other, made):
    rows.tune()
    rows.decide()
    rows.write("ppo-256x1-hard-305", 3051, 0.6, **other)
    headers = lead.counting(REGISTERED)
    assert lead.deciding(REGISTERED, headers) is None and sum(map(len, headers.values())) == made


def test_with_runs_missing_after_the_closing_date_complete_base_models_decide_if_they_are_eight(rows):
    rows.tune()
    rows.decide(BASES[:8])
    entry = {"claim": lead.NAME, "closed": True, "what": "", "why": ""}
    for date, bases in (("2027-05-31", None), ("2027-06-01", BASES[:8])):
        registry.AMENDMENTS.write_text(json.dumps([entry | {"date": date}]), encoding="utf-8")
        assert lead.deciding(REGISTERED, lead.counting(REGISTERED)) == bases
    text = page()
    assert "Over 8 base models." in text and "| **holds** |" in text
    registry.result("dr_grpo-hard-303", 3030).unlink()
    assert "both effects are abandoned.\n" in page()


# --- its runs ---


def test_a_base_model_with_other_weights_stops_the_queue(rows):
    command = "ppo.py --model_name_or_path runs/lab/hard-{} --seed 1"
    rows.write("tune-dr_grpo-lr_1e-4", 321, 0.5)  # its command has the seed in the place of the base model's name
    run.check_weights(REGISTERED, command.format(321), {"base": "weights"})
    run.check_weights(REGISTERED, command.format(322), {"base": "others"})
    run.check_weights(REGISTERED, "ppo.py --model_name_or_path embedded-hard", {})
    with pytest.raises(SystemExit, match="hard-321: other weights than those of tune-dr_grpo-lr_1e-4-seed321.jsonl"):
        run.check_weights(REGISTERED, command.format(321), {"base": "others"})


def test_the_runner_takes_the_file_and_the_seed_chooses_the_base_model_of_the_tuning(rows, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["run.py", "--registered", str(lead.LEAD), "--list"])
    run.main()
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 144 and said[0].startswith("1/144 tune-dr_grpo-lr_1e-4 seed 321: dr_grpo.py --model_name_or")
    ran = []
    monkeypatch.setattr(run, "prepare", lambda registered, command, seed: None)
    monkeypatch.setattr(run, "origin", lambda command: {})
    monkeypatch.setattr(run, "check_weights", lambda *arguments: None)
    monkeypatch.setattr(run, "execute", lambda command, folder: (ran.append(command), (1, "", 0))[1])
    run.run_registered(REGISTERED, "tune-ppo-32x8-lr_2e-4", 322)
    assert "--model_name_or_path runs/lab/hard-322 --dataset runs/lab/hard-322 --eval_dataset" in ran[0]
    assert "--eval_dataset runs/lab/held_out-hard-322.jsonl" in ran[0] and ran[0].endswith("2e-4 --seed 322")
    start = registry.starts()[0]
    assert (start["run"], start["seed"]) == ("tune-ppo-32x8-lr_2e-4", 322) and "hard-{seed}" in start["command"]


def test_code_outside_of_the_repository_is_in_no_commit(rows):
    assert not run.origin("")["clean"]  # the copy of the registration is not in it


def test_results_are_of_registered_runs_and_each_has_its_start():
    with registry.using(lead.LEAD):
        jobs = {registry.result(*job).name: job for job in registry.jobs(REGISTERED)}
        started = {(start["run"], start["seed"], start["started"]) for start in registry.starts()}
        for path in registry.RESULTS.glob("*-seed*.jsonl"):
            job = jobs[path.name]
            header = registry.read(*job)[0]
            assert not registry.fault(*job) and (*job, header["started"]) in started, path.name


@pytest.mark.skipif(not (ROOT / ".git").exists() or not shutil.which("git"), reason="needs git and the history")
def test_runs_were_begun_by_commits_that_have_the_registration():
    with registry.using(lead.LEAD):
        assert all(map(registry.registered_before, {start["commit"] for start in registry.starts()}))


# --- the pages ---


def test_the_page_has_what_the_rows_give():
    [part] = lead.PART.findall((ROOT / lead.PAGE).read_text(encoding="utf-8"))
    assert part == lead.build()


def ends(arm, base):
    """The mean accuracy after step 80 of an arm's two runs on a base model, read without registry.py."""
    files = [ROOT / f"lab/results/lead/{arm}-{base}-seed{seed}.jsonl" for seed in REGISTERED["seeds"][base]]
    rows = [json.loads(file.read_text(encoding="utf-8").splitlines()[-1]) for file in files]
    assert all(row["completions"] == 20480 for row in rows)
    shares = {"easy": 0.125, "medium": 0.375, "hard": 0.5}
    return np.mean([sum(share * row[f"eval/logged/{name}"] for name, share in shares.items()) for row in rows])


@pytest.mark.parametrize(
    ("arm", "against", "effect"),
    [
        ("ppo-256x1", "ppo-32x8", "0.034 (0.028 {to} 0.040)"),
        ("ppo-32x8", "dr_grpo", "0.035 (0.027 {to} 0.043)"),
        ("ppo-256x1", "dr_grpo", "0.069"),
    ],
)
def test_what_the_pages_say_of_the_experiment_is_in_the_rows(arm, against, effect):
    """By hand: twelve differences, their mean, and t times their standard error. Both registered effects hold."""
    differences = np.array([ends(arm, base) - ends(against, base) for base in BASES])
    half = lead.decide.stats.t.isf(0.025, 11) * differences.std(ddof=1) / np.sqrt(12)
    numbers = differences.mean(), differences.mean() - half, differences.mean() + half
    assert re.findall(r"\d\.\d+", effect) == [f"{number:.3f}" for number in numbers][: 1 + 2 * ("to" in effect)]
    words = {"README.md": effect.format(to="to"), "README.zh.md": effect.format(to="至").replace(" (", "（")}
    words[lead.PAGE] = "+{:.3f} (+{:.3f} to +{:.3f})".format(*numbers)
    for page, said in words.items():
        text = (ROOT / page).read_text(encoding="utf-8")
        assert said.removesuffix("）").removesuffix(")") in text, page
    with registry.using(lead.LEAD):
        assert verdicts() == [registry.HOLDS] * 2
    assert "and both of its effects hold" in (ROOT / lead.PAGE).read_text(encoding="utf-8")


def test_the_page_of_the_claims_is_not_made_from_these_rows(tmp_path, monkeypatch):
    (tmp_path / "results" / "lead").mkdir(parents=True)
    monkeypatch.setattr(registry, "HERE", tmp_path)
    before = report.fingerprint()
    (tmp_path / "results" / "lead" / "ppo-seed1.jsonl").write_text("{}\n", encoding="utf-8")
    (tmp_path / "registered_lead.json").write_text("{}\n", encoding="utf-8")
    assert report.fingerprint() == before
