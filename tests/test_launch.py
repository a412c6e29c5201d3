"""Runs in real processes: two against one, `kill -9` and resume, and failures."""

import json
import time

import accelerate.commands.launch
import pytest
from safetensors.torch import load_file

import worker
from common.load import EMBEDDED
from pinned_worker import pinned
from processes import free_port, run_processes, start
from small_run import same_run
from testbed import PAIRS, ROOT, SCRIPTS, keeps_to_groups, learns_from_rewards, metric_rows, script

QUICK = "--prompts_per_step 8 --group_size 4 --max_new_tokens 24 --eval_prompts 2 --eval_samples 4".split()
QUICK += "--eval_every 2 --save_every 1".split()


@pytest.mark.parametrize("name", SCRIPTS)
def test_two_processes_take_the_same_step(name, tmp_path):
    # trl#3021, verl#2776, ...: denominators local to a rank. Unequal lengths, several minibatches and epochs, and
    # another number of micro-batches on each rank (its fillers must count for nothing).
    if not keeps_to_groups(script(name)):
        pytest.skip("the advantages depend on other groups: only `main` can count those of all processes")
    if not learns_from_rewards(script(name), script(name).Args()):
        pytest.skip("the reference of this batch is the policy, and as a teacher teaches nothing")
    result = run_processes("tests/helpers/worker.py", name, tmp_path, processes=2)
    assert result.returncode == 0, result.stderr
    one, two = worker.compared(name, tmp_path)
    assert two["metrics"] == pytest.approx(one["metrics"], rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("name", [name for name in SCRIPTS if hasattr(script(name), "History")])
def test_two_processes_share_the_history(name, tmp_path, monkeypatch):
    # Prompts with a history move between the processes.
    lines = (EMBEDDED["embedded"] / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "train.jsonl").write_text("".join(lines[20:26]), encoding="utf-8")
    (tmp_path / "test.jsonl").write_text("".join(lines[26:29]), encoding="utf-8")
    options = "--max_steps 4 --prompts_per_step 4 --group_size 4 --num_minibatches 2 --micro_batch_size 3"
    options += f" --max_new_tokens 32 --eval_samples 4 --eval_every 0 --dataset {tmp_path}"
    command = [name, *options.split(), "--output_dir"]
    monkeypatch.setattr(script(name), "rollout", pinned(script(name).rollout))
    script(name).main([*command[1:], str(tmp_path / "one")])
    result = run_processes("tests/helpers/pinned_worker.py", *command, tmp_path / "two", processes=2)
    assert result.returncode == 0, result.stderr
    one, two = (metric_rows(tmp_path / x) for x in ("one", "two"))
    assert one[4]["dcpo/visit"] > 2  # from the third visit on the two smoothed advantages differ
    for a, b in zip(one, two, strict=True):
        assert b == pytest.approx(a, rel=1e-3, abs=1e-6)
    a, b = (load_file(tmp_path / x / "model" / "model.safetensors") for x in ("one", "two"))
    assert max(float((a[key] - b[key]).abs().max()) for key in a) < 1e-5  # each update moves by 1e-4


@pytest.mark.parametrize("name", [name for name in SCRIPTS if hasattr(script(name), "dynamic_sampling")])
def test_processes_fill_equal_shares(name, tmp_path):
    # A process that fills its share early must not wait at a collective that the other never reaches.
    (tmp_path / "mine.py").write_text(
        "import os, torch\n"
        "def mine(prompts, completions, **kwargs):\n"
        "    n = len(completions)\n"
        "    with open(f\"seeds-{os.environ['RANK']}\", 'a') as f: f.write(f'{torch.initial_seed()}\\n')\n"
        "    informative = os.environ['RANK'] == '0'\n"
        "    return [float(i % 2 if informative or i < n // 2 else 0) for i in range(n)]\n",
        encoding="utf-8",
    )
    options = "--max_steps 1 --prompts_per_step 8 --group_size 4 --num_minibatches 2 --overlong none"
    options += " --max_new_tokens 24 --eval_prompts 2 --eval_samples 4 --eval_every 0 --reward mine.py:mine"
    command = [f"{name}.py", *options.split(), "--output_dir", "run"]
    result = run_processes(*command, processes=2, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    row = metric_rows(tmp_path / "run")[1]
    assert row["sampling/rounds"] == 2 and row["sampling/keep_rate"] == 0.75
    assert row["sampling/surplus"] == 2  # the mean of 4 and 0 groups
    assert row["sampling/short"] == 0 and row["optim/grad_norm"] > 0
    seeds = [seed for rank in (0, 1) for seed in (tmp_path / f"seeds-{rank}").read_text(encoding="utf-8").split()]
    assert len(seeds) == 8 and len(set(seeds)) == 6  # two rounds, and two evaluations with the same seeds


def kill_after_checkpoint(running, folder, step):
    """`kill -9` the processes of a run once checkpoint `step` is there."""
    deadline = time.time() + 120
    while not (folder / "checkpoints" / f"step-{step:08d}").exists():
        assert all(process.is_alive() for process in running), "the run ended before it could be killed"
        assert time.time() < deadline
        time.sleep(0.02)
    for process in running:
        process.kill()
    for process in running:
        process.join()


@pytest.mark.parametrize("processes", [1, 2])
def test_resume_after_a_kill_is_bit_exact(processes, tmp_path):
    command = ["grpo.py", *QUICK, "--max_steps", "5", "--gradient_checkpointing", "--output_dir"]
    result = run_processes(*command, tmp_path / "a", processes=processes)
    assert (result.returncode, result.stderr) == (0, "")  # no library prints a warning
    port = free_port()
    running = [start([*command, tmp_path / "b"], rank, processes, port) for rank in range(processes)]
    kill_after_checkpoint(running, tmp_path / "b", 2)
    assert not (tmp_path / "b" / "model").exists()
    names = {path.name for path in max((tmp_path / "b" / "checkpoints").glob("step-*")).iterdir()}
    random_states = {f"random_states_{rank}.pkl" for rank in range(processes)}
    assert names == {"model.safetensors", "optimizer.bin", "state.json"} | random_states
    result = run_processes(*command, tmp_path / "b", "--resume", processes=processes)
    assert result.returncode == 0 and "resumed" in result.stdout, result.stderr
    same_run(tmp_path / "a", tmp_path / "b")
    if processes == 2:  # both refuse a folder that the first one found used; one of them can go on alone
        result = run_processes(*command, tmp_path / "b", processes=2, patience=60)
        assert result.codes == [2, 2] and "already contains" in result.stderr
        result = run_processes(*command, tmp_path / "b", "--resume", "--max_steps", "6")
        assert result.returncode == 0 and "other processes (checkpoint: 2, now: 1)" in result.stdout
        assert [row["step"] for row in metric_rows(tmp_path / "b")] == [*range(7)]


@pytest.mark.parametrize("name", [name for name in SCRIPTS if not hasattr(script(name), "dynamic_sampling")])
def test_processes_share_prompts(name, tmp_path):
    # R1-V#67, tt-metal#48829, unsloth-zoo#832: the same prompts or the same noise on every rank. The reward function
    # writes down what each process was given.
    (tmp_path / "spy.py").write_text(
        "import json, os, torch\n"
        "def spy(prompts, completions, **kwargs):\n"
        "    rank, seed = os.environ['RANK'], torch.initial_seed()  # what the sampler was seeded with\n"
        "    with open(f'seen-{rank}.jsonl', 'a') as f: f.write(json.dumps([prompts, completions, seed]) + '\\n')\n"
        "    return [float(len(c)) for c in completions]\n",
        encoding="utf-8",
    )
    options = "--max_steps 1 --prompts_per_step 4 --group_size 4 --num_minibatches 1"
    options += " --eval_prompts 3 --eval_samples 4 --eval_every 0 --reward spy.py:spy"
    command = [f"{name}.py", *options.split()]
    result = run_processes(*command, "--output_dir", "run", processes=2, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    seen = [(tmp_path / f"seen-{rank}.jsonl").read_text(encoding="utf-8").splitlines() for rank in (0, 1)]
    seen = [list(map(json.loads, lines)) for lines in seen]
    evaluations, steps, _ = zip(*seen, strict=True)
    assert [len(prompts) for prompts, *_ in evaluations] == [8, 8]  # three prompts on two processes: one filler
    assert len({*evaluations[0][0], *evaluations[1][0]}) == 3
    assert [len(set(prompts)) for prompts, *_ in steps] == [2, 2] and not set(steps[0][0]) & set(steps[1][0])
    assert len({call[2] for rank in seen for call in rank}) == 4  # both evaluations use the same seed
    row = metric_rows(tmp_path / "run")[0]
    counted = [len(c) for c in evaluations[0][1]] + [len(c) for c in evaluations[1][1][:4]]  # the filler is not counted
    assert row["eval/reward"] == pytest.approx(sum(counted) / 12)


@pytest.mark.parametrize("name", PAIRS)
def test_processes_share_pairs(name, few_pairs, tmp_path):
    # With the same pairs on both, the second step's loss would be that of half of them.
    options = [*few_pairs, "--pairs_per_step", "8", "--max_steps", "2", "--eval_every", "0"]
    losses = []
    for processes in (1, 2):
        command = [f"{name}.py", *options, "--output_dir", f"run-{processes}"]
        result = run_processes(*command, processes=processes, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        rows = metric_rows(tmp_path / f"run-{processes}")
        losses.append([row["optim/loss"] for row in rows if "optim/loss" in row])
    assert losses[0][1] != losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


WAITS_OR_FAILS = """
import os, time
from common.run import Exit, clean_exit
with clean_exit():
    if os.environ["RANK"] == "1":
        raise Exit("broken")
    time.sleep(100)
"""


def test_one_failing_process_ends_all(tmp_path):
    """With the real launcher: no rank hangs, and the reason is not hidden behind "error_file: <N/A>"."""
    file = tmp_path / "waits.py"
    file.write_text(WAITS_OR_FAILS, encoding="utf-8")
    flags = "--num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no --main_process_port 0"
    command = [accelerate.commands.launch.__file__, "--multi_gpu", *flags.split(), file]
    result = run_processes(*command, env={"PYTHONPATH": str(ROOT)}, timeout=60)
    assert result.returncode == 1
    assert result.stderr.count("waits.py: error: broken") == 1


@pytest.mark.parametrize("processes", [1, 2])
def test_bad_input_prints_one_line_each(processes):
    result = run_processes("grpo.py", "--group_size", "1", processes=processes)
    lines = [line for line in result.stderr.splitlines() if line]
    assert len(lines) <= processes and result.stdout == "" and 2 in result.codes
    assert all(line.startswith("grpo.py: error: --group_size 1: ") for line in lines) and lines


def test_signalled_processes_stop_together(tmp_path):
    (tmp_path / "spy.py").write_text(
        "import os, signal\n"
        "def spy(prompts, completions, **kwargs):\n"
        "    if os.environ['RANK'] == '1' and len(completions) == 16:\n"  # a step's; an evaluation has 8
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return [float(len(c)) for c in completions]\n",
        encoding="utf-8",
    )
    options = "--prompts_per_step 8 --group_size 4 --eval_prompts 3 --eval_samples 4 --eval_every 2 --max_steps 3"
    command = ["grpo.py", *options.split(), "--reward", "spy.py:spy", "--output_dir", "run"]
    result = run_processes(*command, processes=2, cwd=tmp_path, patience=60)
    assert "stopped at step 1: continue with --resume --output_dir run" in result.stdout, result.stderr
    assert result.codes == [143, 143]
    assert (tmp_path / "run" / "checkpoints" / "step-00000001" / "state.json").exists()
    assert not (tmp_path / "run" / "model").exists()
