"""The Chinese pages: README.zh.md has the numbers of README.md, and all that they link to and quote is there."""

import ast
import pathlib
import re

import pytest
import yaml

ROOT = pathlib.Path(__file__).parent.parent
PAGES = ["README.zh.md", "docs/theory.zh.md", "docs/run.zh.md"]


def read(page):
    return (ROOT / page).read_text(encoding="utf-8")


def sections(path):
    """The anchors of a page: those that GitHub makes of its titles, and its own."""
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    named = re.findall(r'<a id="([^"]+)"', text)
    return named + [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]


def facts(page):
    """The code blocks of a page without their comments, and the numbers of its table of results."""
    code = re.findall(r"^```.*?^```", read(page), re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^\| `python \w+\.py` \| .*$", read(page), re.MULTILINE)
    return [re.sub(r"^# .*\n", "", block, flags=re.MULTILINE) for block in code], rows


def test_the_chinese_readme_has_the_code_and_the_numbers_of_the_english_one():
    code, rows = facts("README.zh.md")
    assert len(code) >= 4 and len(rows) >= 7
    assert (code, rows) == facts("README.md")


@pytest.mark.parametrize("page", PAGES)
def test_each_link_leads_to_a_file_a_section_and_a_definition(page):
    text = re.sub(r"```.*?```", "", read(page), flags=re.DOTALL)
    links = re.findall(r"\[([^\[\]]*)\]\((?!http)([^)#]*)#?([^)]*)\)", text)
    assert len(links) > 5
    for label, file, section in links:
        target = (ROOT / page).parent / file if file else ROOT / page
        assert target.exists(), file
        assert not section or section in sections(target), f"{file}#{section}"
        if label.startswith("`") and file.endswith(".py"):
            name = label.strip("`").split(".")[-1]
            defined = rf"^ *(def|class) {name}\b|^ +{name}: "
            assert re.search(defined, target.read_text(encoding="utf-8"), re.MULTILINE), label


def table(page, title):
    """The rows of the first table behind a title, each a list of cells, without marks such as *."""
    text = read(page).split(f"\n### {title}\n")[1].split("\n#")[0]
    rows = [line for line in text.splitlines() if line.startswith("|")]
    return [[re.sub("[*†,]", "", cell).strip() for cell in row.strip("|").split("|")] for row in rows]


def test_the_recipes_are_those_of_the_configurations():
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


def test_the_errors_are_in_the_words_of_the_code():
    sources = [*ROOT.glob("harness/*.py"), ROOT / "tools/names.py"]
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


# What readers of Chinese articles search for.
WORDS = """SFT 人类偏好 KL约束 步长 即时奖励 环境奖励 退化 旧价值 ppo_kl 多回答 rollout_n 目标回报 投票 状态访问分布 裁切
seq-level Sample-Level 样本级 过采样 有效样本 KL球 硬丢弃 Long-CoT Actor-Critic A2C Pairwise 奖励衰减 tis_imp_ratio_cap
Rule-based 归一化因子 Clip-Shifting compute_old_logp PPO-Penalty one-hot n步 KL散度 配分函数 整数 vf_clipfrac"""


def test_the_words_of_chinese_articles_are_found():
    text = read("docs/theory.zh.md")
    assert [word for word in [*WORDS.split(), "LLM as Judge"] if word not in text] == []
