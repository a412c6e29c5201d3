"""The Chinese pages: README.zh.md has the numbers of README.md, and what they quote is there."""

import ast
import pathlib
import re

import yaml

ROOT = pathlib.Path(__file__).parent.parent


def read(page):
    return (ROOT / page).read_text(encoding="utf-8")


def facts(page):
    """The code blocks of a page without their comments, and the numbers of its table of results."""
    code = re.findall(r"^```.*?^```", read(page), re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^\| `python \w+\.py[^`]*` \| .*$", read(page), re.MULTILINE)
    return [re.sub(r"^# .*\n", "", block, flags=re.MULTILINE) for block in code], rows


def test_both_readmes_have_the_same_numbers():
    code, rows = facts("README.zh.md")
    assert len(code) >= 4 and len(rows) >= 7
    assert (code, rows) == facts("README.md")


def table(page, title):
    """The rows of the first table behind a title, each a list of cells, without marks such as *."""
    text = read(page).split(f"\n### {title}\n")[1].split("\n#")[0]
    rows = [line for line in text.splitlines() if line.startswith("|")]
    return [[re.sub("[*†,]", "", cell).strip() for cell in row.strip("|").split("|")] for row in rows]


def test_recipes_are_those_of_configs():
    head, _, *rows = table("docs/theory.zh.md", "论文配方")
    rows = {row[0]: row[1:] for row in rows}
    for i, link in enumerate(head[1:]):
        config = yaml.safe_load(read(re.search(r"\.\./(configs/[\w-]+\.yaml)", link)[1]))
        updates = config["num_epochs"] * config["num_minibatches"]
        expected = {
            "prompt 数 × 回答数": f"{config['prompts_per_step']} × {config['group_size']}",
            "每个 rollout 更新几次": str(updates),
            "prompt、回答的最大长度": f"{config['max_prompt_tokens']}、{config['max_new_tokens']}",
            "学习率": config["learning_rate"],
            "预热步数": str(config.get("warmup_steps", 0)),
            "KL 系数": f"{config['kl_coef']:g}",
            "采样温度": f"{config['temperature']:g}",
            "权重衰减、梯度范数上限": f"{config.get('weight_decay', 0):g}、{config.get('max_grad_norm', 1):g}",
        }
        for name, value in expected.items():
            assert re.match(rf"{re.escape(str(value))}(?![\d.])", rows[name][i]), (link, name)
        low, high = rows["裁剪，下 / 上"][i].split("，")[0].split(" / ")
        assert (float(low), float(high)) == (float(config["clip_low"]), float(config["clip_high"])), link


def test_quoted_errors_are_the_codes():
    sources = [*ROOT.glob("common/*.py"), *ROOT.glob("*.py")]
    nodes = [node for file in sources for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    words = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    messages = re.findall(r"^\| `([^`]+)` \|", read("docs/run.zh.md").split("常见的十种报错")[1], re.MULTILINE)
    assert len(messages) == 10
    for message in messages:
        assert any(len(word) >= 12 and " " in word.strip() and word in message for word in words), message


def test_the_readme_counts_the_misconceptions():
    section = read("docs/theory.zh.md").split("\n## 16. ")[1].split("\n## ")[0]
    rows = re.findall(r"^\| \[", section, re.MULTILINE)
    assert f"[{len(rows)} 条常见误解]" in read("README.zh.md")
