"""Rules decide by the parsed command and the real file: allowing needs certainty, denying never misses for want of it."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pkg import limits, texts
from pkg.agent_api import ApprovalRequested, Choice, FileDiff, ToolKind
from pkg.approval_policy import (
    Verdict,
    grant,
    inside_lexically,
    inside_really,
    judge,
    names_lexically,
    names_really,
    refusal,
    session_policy,
)
from pkg.approval_rules import RuleError, leads_to, matches, parse
from pkg.command_line import parse as parse_line

ONCE = Choice("yes", "Yes", "allow_once")
NO = Choice("no", "No", "reject_once")


def request(kind: ToolKind = "execute", command: str = "", paths: Sequence[str] = (), **more: object) -> ApprovalRequested:
    """What an agent asks, in ``/ws`` unless said otherwise."""
    fields: dict[str, object] = {"cwd": "/ws", **more}
    return ApprovalRequested("r", "title", kind, (ONCE, NO), command=command, paths=tuple(paths), **fields)  # type: ignore[arg-type]


def judged(rules: str, asked: ApprovalRequested, policy: str = "ask") -> Verdict:
    """The verdict for a workspace ``/ws`` on another machine."""
    return judge(policy, parse(rules), asked, inside_lexically("/ws"), names_lexically("/ws"))


def of_command(rules: str, command: str, policy: str = "ask") -> str:
    """The verdict about a command line."""
    return judged(rules, request(command=command), policy).verdict


# ------------------------------------------------------------------ reading


class TestReading:
    """One rule a line; what is none is named by its line."""

    def test_what_a_rule_may_be(self) -> None:
        """Comments, blank lines, spaces, quotes, patterns with parentheses."""
        text = """
            # what may always be
            allow execute(git status *)   # a comment
            deny  edit ( secrets/** )
            ask fetch
            allow mcp:github.get_issue
            deny mcp:files.*
            deny *
            allow execute(git commit -m 'a (b) # c')
            ask edit(app/(shop)/page.tsx)
        """
        assert [str(rule) for rule in parse(text)] == [
            "rule 3: allow execute(git status *)",
            "rule 4: deny edit(secrets/**)",
            "rule 5: ask fetch",
            "rule 6: allow mcp:github.get_issue",
            "rule 7: deny mcp:files.*",
            "rule 8: deny *",
            "rule 9: allow execute(git commit -m 'a (b) # c')",
            "rule 10: ask edit(app/(shop)/page.tsx)",
        ]
        assert parse("\r\n#\n\n") == ()

    @pytest.mark.parametrize(
        ("text", "problem", "line"),
        [
            ("allow", "rule_shape", 1),
            ("allow read\npermit read", "rule_shape", 2),
            ("# x\n\nAllow read", "rule_shape", 3),
            ("allow read write", "rule_shape", 1),
            ("allow execute(git status", "rule_shape", 1),
            ("allow execute(git 'status)", "rule_shape", 1),
            ("allow bash", "rule_kind", 1),
            ("allow mcp:github", "rule_kind", 1),
            ("allow mcp:*.x", "rule_kind", 1),
            ("allow execute()", "rule_empty", 1),
            ("allow execute(  )", "rule_empty", 1),
            ("allow fetch(example.org)", "rule_no_pattern", 1),
            ("deny *(x)", "rule_no_pattern", 1),
            ("allow execute(git status; ls)", "rule_command", 1),
            ("allow execute(git $X)", "rule_command", 1),
            ("deny execute(git st*)", "rule_command", 1),
            ("deny execute(X=1 make)", "rule_command", 1),
            ("deny execute(make > log)", "rule_command", 1),
            ("allow execute(find . -exec rm *)", "rule_command", 1),
            ("allow execute(sudo *)", "rule_runs_others", 1),
            ("allow execute(/usr/bin/env *)", "rule_runs_others", 1),
            ("allow execute(sh -c *)", "rule_runs_others", 1),
            ("allow execute(bash *)", "rule_runs_others", 1),
            ("allow execute(xargs rm)", "rule_runs_others", 1),
            ("deny edit(../x)", "rule_path", 1),
            ("deny edit(~/.ssh/**)", "rule_path", 1),
            ("deny edit(src/**.py)", "rule_path", 1),
            ("deny edit(src\\x)", "rule_path", 1),
            ("allow edit(/etc/**)", "rule_path_outside", 1),
            ("\n".join(["deny read"] * (limits.APPROVAL_RULES + 1)), "rule_too_many", limits.APPROVAL_RULES + 1),
            ("deny execute(" + "x" * limits.APPROVAL_RULE_CHARS + ")", "rule_too_long", 1),
        ],
    )
    def test_what_no_rule_is(self, text: str, problem: str, line: int) -> None:
        """The line and a text a person can act on, in every language."""
        with pytest.raises(RuleError) as caught:
            parse(text)
        assert (caught.value.problem, caught.value.line) == (problem, line)
        for language in texts.LANGUAGES:
            told = texts.render(f"problem.{problem}", language, {"line": line})
            assert str(line) in told and "{" not in told

    @given(st.text(alphabet="allow deny execute(*)#'\"\\\n/.git ", max_size=60))
    def test_any_text_is_rules_or_one_error(self, text: str) -> None:
        """No other exception."""
        try:
            parse(text)
        except RuleError as error:
            assert 1 <= error.line <= text.count("\n") + 1


# ------------------------------------------------------------------ which rule


class TestPrecedence:
    """The most specific rule that matches decides; deny, ask, allow among equals."""

    @pytest.mark.parametrize(
        ("rules", "command", "verdict"),
        [
            ("allow execute(git *)", "git status", "allow"),
            ("allow execute(git *)\ndeny execute(git push *)", "git push origin", "deny"),
            ("deny execute(git *)\nallow execute(git status)", "git status", "allow"),
            ("deny execute(git *)\nallow execute(git status)", "git status -s", "deny"),
            ("allow execute(git status)\ndeny execute(git status)", "git status", "deny"),
            ("ask execute(git status)\nallow execute(git status)", "git status", "ask"),
            ("deny execute(git status)\nask execute(git status)", "git status", "deny"),
            ("allow execute(git * -s)\ndeny execute(git *)", "git status -s", "allow"),
            ("allow execute(git * *)", "git", "ask"),
            ("allow execute(git *)", "git", "allow"),
            ("allow execute(* --version)", "node --version", "allow"),
            ("allow execute(* --version)", "node x --version", "ask"),
            ("allow execute(*)\ndeny execute", "ls", "allow"),
            ("allow execute\ndeny *", "ls", "allow"),
            ("allow *\ndeny execute(rm *)", "rm x", "deny"),
            ("allow execute(ls)\nallow execute(make *)", "make a && ls", "allow"),
            ("allow execute(ls)", "make a && ls", "ask"),
            ("allow execute(ls)\ndeny execute(rm *)", "ls && rm x", "deny"),
            ("allow execute(ls)\nask execute(rm *)", "ls && rm x", "ask"),
            ("allow read", "ls", "ask"),
        ],
    )
    def test_of_commands(self, rules: str, command: str, verdict: str) -> None:
        """Our rule."""
        assert of_command(rules, command) == verdict

    @pytest.mark.parametrize(
        ("policy", "rules", "verdict", "by"),
        [
            ("ask", "", "ask", "policy ask"),
            ("on-request", "", "ask", "policy on-request"),
            ("allow-edits", "", "ask", "policy allow-edits"),
            ("allow-all", "", "allow", "policy allow-all"),
            ("deny", "", "deny", "policy deny"),
            ("deny", "allow execute(make)", "allow", "rule 1: allow execute(make)"),
            ("deny", "ask execute(make)", "deny", "policy deny"),
            ("allow-all", "\nask execute(make)", "ask", "rule 2: ask execute(make)"),
            ("allow-all", "deny execute(make)", "deny", "rule 1: deny execute(make)"),
            ("allow-all", "deny edit(make)", "allow", "policy allow-all"),
        ],
    )
    def test_rules_come_before_the_policy(self, policy: str, rules: str, verdict: str, by: str) -> None:
        """And where they say nothing it decides; under ``deny`` nobody is asked."""
        found = judged(rules, request(command="make"), policy)
        assert (found.verdict, found.by) == (verdict, by)

    def test_what_people_are_told(self) -> None:
        """A denial names the rule; the answer is the agent's own refusal; a grant is its single one or none."""
        asked = request(command="rm -rf x")
        verdict = judged("deny execute(rm *)", asked)
        decision = refusal(asked, verdict)
        assert (decision.answer.choice_id, decision.allowed) == ("no", False)
        told = texts.render(decision.text_key, "en_US", decision.params)
        assert "rule 1: deny execute(rm *)" in told and "rm -rf x" in told
        answer = grant(asked)
        assert answer is not None and answer.choice_id == "yes"
        standing = ApprovalRequested(
            "r", "t", "execute", (Choice("s", "s", "allow_session"), Choice("a", "a", "allow_always"), NO)
        )
        assert grant(standing) is None
        allowed = Verdict("allow", "policy allow-all")
        assert refusal(standing, allowed).text_key == "approval.no_single_grant"

    @pytest.mark.parametrize(
        ("policy", "rules", "opened"),
        [
            ("allow-all", "deny execute(rm *)", "ask"),
            ("allow-edits", "ask edit(a)", "ask"),
            ("allow-all", "allow execute(ls)", "allow-all"),
            ("deny", "deny read", "deny"),
            ("never", "deny read", "never"),
        ],
    )
    def test_an_agent_is_opened_so_that_it_asks_what_rules_want_to_see(self, policy: str, rules: str, opened: str) -> None:
        """Under policies that let a sandbox decide, some agents would not ask."""
        assert session_policy(policy, parse(rules)) == opened


class TestTools:
    """Kinds, and tools of MCP servers."""

    @pytest.mark.parametrize(
        ("rules", "tool", "verdict"),
        [
            ("allow mcp:github.get_issue", "mcp:github.get_issue", "allow"),
            ("allow mcp:github.get_issue", "mcp:github.get_issues", "ask"),
            ("allow mcp:github.*", "mcp:github.get_issue", "allow"),
            ("allow mcp:github.*", "mcp:githubx.get_issue", "ask"),
            ("allow mcp:github.*\ndeny mcp:github.delete", "mcp:github.delete", "deny"),
            ("deny mcp:github.*\nallow mcp:github.get", "mcp:github.get", "allow"),
            ("allow other", "mcp:github.get", "allow"),
            ("deny other\nallow mcp:github.*", "mcp:github.get", "allow"),
            ("deny mcp:github.*\nallow other", "mcp:github.get", "deny"),
            ("allow mcp:github.get", "", "ask"),
        ],
    )
    def test_by_the_name_the_protocol_gives(self, rules: str, tool: str, verdict: str) -> None:
        """Never by a title, which the agent writes as it likes."""
        named = request("other", 'github: get {"id": 1}', tool=tool)
        assert judged(rules, named).verdict == verdict

    def test_a_tool_whose_name_is_not_known_is_asked_about(self) -> None:
        """Denying never misses for want of certainty."""
        assert judged("deny mcp:github.*", request("other", '{"x": 1}'), "allow-all").verdict == "ask"
        assert judged("deny mcp:github.*", request("other", '{"x": 1}', tool="Task"), "allow-all").verdict == "allow"

    def test_kinds(self) -> None:
        """A kind alone is about every action of it, a command line under another kind is a command line all the same."""
        assert judged("deny fetch", request("fetch", 'WebFetch {"url": "x"}'), "allow-all").verdict == "deny"
        assert judged("allow fetch", request("fetch", 'WebFetch {"url": "x"}')).verdict == "allow"
        assert judged("allow fetch", request("fetch", complete=False)).verdict == "ask"
        assert judged("deny execute(rm *)", request("other", "rm -rf x"), "allow-all").verdict == "deny"
        assert judged("deny execute(rm *)", request("read", "rm -rf x"), "allow-all").verdict == "deny"
        assert judged("allow read", request("read", "cat x; rm y")).verdict == "ask"
        assert judged("deny execute(rm *)", request("mode", "1. rm the $(old) code"), "allow-all").verdict == "allow"

    def test_what_is_not_shown_whole_is_never_allowed_by_a_rule(self) -> None:
        """Our rule; a protected kind of action in it is asked about."""
        cut = request(command="ls", complete=False)
        assert judged("allow execute(ls)\nallow *", cut).verdict == "ask"
        assert judged("deny execute(rm *)", cut, "allow-all").verdict == "ask"
        assert judged("allow edit", request("edit", paths=["a"], complete=False)).verdict == "ask"
        assert judged("deny edit(b)", request("edit", paths=["a"], complete=False), "allow-all").verdict == "ask"
        assert judged("allow execute(ls)", request(command="ls", diffs=(FileDiff("a", None, "x"),))).verdict == "ask"


# ------------------------------------------------------------------ commands

ALLOWED = "allow execute(git status *)\nallow execute(ls *)\nallow execute(echo *)\nallow execute(find *)\nallow execute(cat *)"
NEVER_ALLOWED = [
    *("git status; rm x", "git status && rm x", "git status || rm x", "git status | rm x", "git status & rm x"),
    *("git status\nrm x", "git status\r\nrm x", "git status\rrm x", "git status;rm x", "git status&rm x", ";git status"),
    *("git status $(rm x)", "git status `rm x`", 'git status "$(rm x)"', 'git status "`rm x`"', "echo $((1))", "echo ${x}"),
    *("git status ${IFS}x", "git$IFS'status'", "git${IFS}status", "$x", "${x}", "$0 status", "$'git' status", '$"git" status'),
    *("{git,status}", "{ git status; }", "(git status)", "git status; (rm x)", "ls {a,b}", "ls a{1..3}", "ls }"),
    *("git status > x", "git status >> x", "git status 2> x", "git status >| x", "git status &> x", "git status < x"),
    *(
        "git status <> x",
        "git status 2>&x",
        "cat <<EOF\nrm x\nEOF",
        "cat <<'EOF'\nx\nEOF",
        "cat <<<x",
        "cat <(rm x)",
        "ls >(rm x)",
    ),
    *(
        "git status # x",
        "#\ngit status",
        "x=1 git status",
        "PATH=/tmp git status",
        "GIT_DIR+=x git status",
        "a[0]=1 git status",
    ),
    *("/usr/bin/git status", "./git status", "../git status", "~/git status", "//bin/ls", "bin/ls", "/bin/../bin/ls"),
    *("env git status", "env X=1 git status", "command git status", "nohup git status", "time git status", "sudo git status"),
    *("xargs git status", "sh -c 'git status'", "bash -lc 'git status'", "eval git status", "exec git status", ". git status"),
    *("builtin echo x", "busybox ls", "timeout 5 git status", "nice git status", "watch git status", "script -c ls"),
    *("find . -exec rm {} ;", "find . -exec rm '{}' ';'", "find . -execdir rm x +", "find . -ok rm x", "find . -'exec' rm x +"),
    *("git -C / status", "git --exec-path=/tmp status", "git -c core.fsmonitor=rm status", "git  status\\", "git 'status"),
    *('git "status', "git status &&", "git status |", "git status ;; ls", "ls |& cat", "ls & & ls", "&& ls", "! git status"),
    *("if git status; then ls; fi", "while ls; do ls; done", "for x in a; do ls; done", "[[ -f x ]]", "function ls { rm x; }"),
    *("ls() { rm x; }", "ls () { rm x; }; ls", "alias ls=rm", "alias ls=rm\nls", "hash -p /bin/rm ls; ls", "enable -f x ls"),
    *("trap ls EXIT", "set -x; ls", "export X=1; ls", "ls\x00", "ls\x1b[2J", "ｇｉｔ status", "gіt status", "git\u00a0status"),
    *("git\u2003status", "ls \u00a0;rm x", "git\u200b status", "ls \u202e x", "=git status", "git? status", "g*t status"),
    *(
        "[g]it status",
        "~git status",
        "git status --exec rm",
        "git status --exec=rm",
        "ls -- --exec",
        "- git status",
        "noglob ls",
    ),
    *(
        "GIT status",
        "Git status",
        "git.exe status",
        "git-status",
        "gitstatus",
        "",
        " ",
        "\n",
        "coproc ls",
        "test -v 'a[$(rm x)]'",
    ),
]


class TestCommands:
    """What a line runs is what counts, never what stands in it."""

    @pytest.mark.parametrize("command", NEVER_ALLOWED)
    def test_nothing_more_than_the_rule_says_is_allowed(self, command: str) -> None:
        """Operators, expansions, redirections, wrappers, other programs, look-alikes: a person is asked."""
        assert of_command(ALLOWED, command) == "ask"

    @pytest.mark.parametrize(
        "command",
        [
            *("git status", "git  status\t-s", "'git' status", 'g"i"t stat\\us', "git status; ls", "git status && ls | cat x"),
            *("ls || git status &", "\ngit status\n\nls\n", "git \\\n status", "echo 'a; rm x' \"b && c\" d\\;e", "ls 2>&1"),
            *(
                "ls > /dev/null 2>&1",
                "ls 2>/dev/null|cat",
                "cat </dev/null",
                "ls *.py",
                "ls ~",
                "ls a]",
                "echo é 名",
                "echo x#y",
            ),
            *("echo a=b", "echo '$(x)' '`x`'", 'echo "a\\$b\\`c"', "echo !x", "find . -name '*.py'", "ls &&\nls", "ls -C dir"),
        ],
    )
    def test_what_a_rule_says_is_allowed_however_it_is_quoted(self, command: str) -> None:
        """Lines that only a careless reader takes for something else."""
        assert of_command(ALLOWED, command) == "allow"

    @pytest.mark.parametrize(
        "command",
        [
            *("rm x", "rm", "/bin/rm x", "./rm x", "//bin//rm x", "r''m x", 'r"m" x', "\\rm x", "'rm' x", "r\\\nm x", "RM x"),
            *("ls; rm x", "ls&&rm x", "ls||rm x", "ls|rm x", "ls&rm x", "ls\nrm x", "ls;\n\nrm x", "(rm x)", "{ rm x; }"),
            *("X=1 rm x", "X=1 Y=2 rm x", "rm x > log", "> log rm x", "2>&1 rm x", "! rm x", "if rm x; then ls; fi"),
            *("env rm x", "env X=1 rm x", "env -i rm x", "env -u A rm x", "env -- rm x", "/usr/bin/env rm x", "nohup rm x"),
            *("time rm x", "time -p rm x", "command rm x", "command -p rm x", "exec rm x", "sudo rm x", "nice rm x"),
            *("nice -n 5 rm x", "timeout 5s rm x", "setsid rm x", "busybox rm x", "toybox rm x", "nohup env nice rm x"),
            *("sh -c 'rm x'", "sh -c 'ls; rm x'", 'bash -lc "rm x"', "/bin/sh -c 'env rm x'", "sh -c \"sh -c 'rm x'\""),
            *("rm $(x)", "rm `x`", "rm $x", "rm *", "rm ~", "rm {a,b}", "rm -rf ${x}", "while ls; do rm x; done"),
        ],
    )
    @pytest.mark.parametrize("policy", ["ask", "allow-all"])
    def test_what_is_denied_is_denied_wherever_it_stands(self, command: str, policy: str) -> None:
        """Quotes, directories, wrappers and operators do not hide a program, whatever else is allowed."""
        assert of_command("deny execute(rm *)\nallow execute(ls *)\nallow *", command, policy) == "deny"

    @pytest.mark.parametrize(
        "command",
        [
            *("$(echo rm) x", "`echo rm` x", "r${x}m x", "$x x", "r$'m' x", "eval 'rm x'", "eval rm x", "echo rm x | sh"),
            *("echo x | xargs rm", "xargs rm", "find . -exec rm {} +", "find . -exec 'rm' x ';'", "fd -x rm", "sudo -u a rm x"),
            *("env -S 'rm x'", "sh x.sh | sh -s", 'sh -c "$x"', "sh -c $x", "bash -x -c 'rm x'", ". ./x", "source x"),
            *(
                "cat <<EOF | sh\nrm x\nEOF",
                "cat <(rm x)",
                "{r,}m x",
                "{rm,x}",
                "r? x",
                "r[m] x",
                "alias a=rm; a x",
                "su -c 'rm x'",
            ),
            *("ls 'unterminated", 'ls "unterminated', "ls \\", "script -c 'rm x'", "watch rm x", "strace rm x", "parallel rm"),
            *("ssh-agent $x", "trap 'rm x' EXIT", "printf -v 'a[$(rm x)]' y", "ls # rm x", "git rebase --exec 'rm x'"),
            *("timeout -s 9 5 rm x", "nice -5 rm x", "stdbuf -oL rm x", "x=rm; $x y", "ls\rrm x", "ls\u00a0rm", "=rm x", "#rm"),
        ],
    )
    def test_what_is_not_understood_is_asked_about(self, command: str) -> None:
        """Even where everything else is allowed; without such a rule it is the policy's."""
        assert of_command("deny execute(rm *)", command, "allow-all") == "ask"
        assert of_command("ask execute(rm *)", command, "allow-all") == "ask"
        assert of_command("deny execute(rm *)\nallow execute(*)\nallow *", command, "allow-all") == "ask"
        assert of_command("deny edit(a)", command, "allow-all") == "allow"
        assert of_command("allow *\nallow execute\nallow execute(*)", command) == "ask"
        assert of_command("deny execute(rm *)", command, "deny") == "deny"
        assert of_command("deny execute", command, "allow-all") == "deny"

    @pytest.mark.parametrize(
        ("command", "verdict"),
        [
            *(("git push", "deny"), ("git push origin", "deny"), ("git -C dir push", "ask"), ("git -c a=b push x", "ask")),
            *(("git --no-pager push", "ask"), ("git commit -m push", "allow"), ("git status", "allow"), ("git $x", "ask")),
            *(("git *", "ask"), ("git -C push", "ask"), ("gitk push", "allow")),
        ],
    )
    def test_options_before_a_denied_word_do_not_hide_it(self, command: str, verdict: str) -> None:
        """Whether a word behind an option is its value cannot be told: a person looks."""
        assert of_command("deny execute(git push *)", command, "allow-all") == verdict

    def test_denied_options_are_seen_anywhere(self) -> None:
        """Behind other words, too."""
        rules = "deny execute(git push --force *)"
        assert of_command(rules, "git push --force", "allow-all") == "deny"
        assert of_command(rules, "git push origin --force", "allow-all") == "ask"
        assert of_command(rules, "git push origin", "allow-all") == "allow"

    def test_a_program_by_its_path_is_allowed_only_by_a_rule_that_names_it(self) -> None:
        """From the workspace's own directory where the path is relative."""
        rules = "allow execute(./gradlew *)\nallow execute(/usr/bin/make)\nallow execute(cd *)"
        assert of_command(rules, "./gradlew test") == "allow"
        assert of_command(rules, "/usr/bin/make") == "allow"
        assert of_command(rules, "gradlew test") == "ask"
        assert of_command(rules, "make") == "ask"
        assert of_command(rules, "cd sub && ./gradlew test") == "ask"
        assert judged(rules, request(command="./gradlew test", cwd="/ws/sub")).verdict == "ask"
        assert judged(rules, request(command="./gradlew test", cwd="")).verdict == "allow"
        assert of_command("allow execute(*)", "/tmp/x") == of_command("allow execute", "./x") == "ask"

    @pytest.mark.parametrize("cwd", ["/", "/tmp", "/ws/..", "/ws/../tmp", "/wsx", "~", "..", "$HOME"])
    def test_nothing_is_allowed_in_a_directory_outside_of_the_workspace(self, cwd: str) -> None:
        """The same words mean another thing there."""
        assert judged("allow execute(make)", request(command="make", cwd="/ws/sub")).verdict == "allow"
        assert judged("allow execute(make)", request(command="make", cwd=cwd)).verdict == "ask"

    @pytest.mark.parametrize("command", ["sudo ls", "doas ls", "exec ls", "env X=1 ls", "xargs ls", "sh x.sh -c ls; sh -s"])
    def test_other_rights_and_other_variables_are_never_allowed_by_a_rule(self, command: str) -> None:
        """Not even by one for every command."""
        assert of_command("allow *\nallow execute\nallow execute(*)", command) == "ask"
        assert of_command("allow execute(*)", "nohup ls") == "allow"

    def test_the_lines_of_another_language_are_never_understood(self) -> None:
        """PowerShell has other quotes: what a POSIX shell takes for one word is several commands there."""
        asked = request(command="ls x", tool="PowerShell")
        assert judged("allow execute(ls *)", asked).verdict == "ask"
        assert judged("deny execute(rm *)", asked, "allow-all").verdict == "ask"

    def test_a_huge_or_deep_line_is_not_understood_and_costs_little(self) -> None:
        """Our bounds; nothing is raised."""
        nested = "rm x"
        for _ in range(limits.COMMAND_DEPTH + 3):
            nested = "sh -c '" + nested.replace("'", "'\\''") + "'"
        rules = "\n".join(f"deny execute(rm{' *' * count} x y z *)" for count in range(100)) + "\ndeny edit(**/*a*a*a*a*b)"
        many = limits.COMMAND_WORDS + 1
        lines = (nested, "env " * many + "ls", "ls " + "x" * limits.COMMAND_CHARS, "ls;" * many + "cat x", "rm " + "-a " * many)
        began = time.process_time()
        for command in lines:
            assert of_command(rules, command, "allow-all") == "ask"
            assert of_command("allow execute\nallow execute(*)", command) == "ask"
        assert judged(rules, request("edit", paths=["a" * 4000 + "/" + "a" * 255]), "allow-all").verdict == "allow"
        # Of this process alone; a matcher that tries every way would need hours.
        assert time.process_time() - began < 30


# ------------------------------------------------------------------ real shells

PIECES = [
    *("a", "b", "c", " ", " ", " a", " b ", ";", "&", "&&", "|", "||", "\n", "'", '"', "\\", "$", "`", "(", ")", "{", "}"),
    *(
        "<",
        ">",
        "*",
        "?",
        "#",
        "~",
        "=",
        "!",
        "2>&1",
        ">/dev/null",
        "a b;",
        "'b'",
        "\\b",
        "\\\n",
        '"a b"',
        "$x",
        "${x}",
        "$(b)",
    ),
    *("`b`", "<<a\nb\na\n", "a=b ", "env b", "sh -c 'b'", ",", "[", "]", "\t", "é", "x"),
]
RECORDER = '#!/bin/sh\nprintf \'%s\\001\' "$#" "${0##*/}" "$@" >&9\n'


@dataclass
class Shells:
    """Real shells whose only programs write down that they ran."""

    directory: Path

    def ran(self, shell: str, line: str) -> list[tuple[str, ...]]:
        """Every program that ``line`` ran, with its words."""
        reading, writing = os.pipe()
        try:
            process = subprocess.Popen(
                [f"/bin/{shell}", "-c", f"exec 9>&2 2>/dev/null\n{line}"],
                cwd=self.directory / "cwd",
                env={"PATH": str(self.directory / "bin"), "HOME": "/home/nobody", "LC_ALL": "C.UTF-8"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=writing,
            )
        finally:
            os.close(writing)
        with os.fdopen(reading, "rb") as stream:
            fields = stream.read().decode("utf-8", "surrogateescape").split("\x01")
        process.wait(30)
        found, at = [], 0
        while at < len(fields) - 1:
            count = int(fields[at])
            found.append(tuple(fields[at + 1 : at + 2 + count]))
            at += 2 + count
        return found


@pytest.fixture(scope="module")
def shells(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shells]:
    """See :class:`Shells`."""
    root = tmp_path_factory.mktemp("shells")
    (root / "cwd").mkdir()
    (root / "bin").mkdir()
    for name in ("a", "b", "c", "aa", "ab", "ba", "bb"):
        program = root / "bin" / name
        program.write_text(RECORDER)
        program.chmod(0o755)
    (root / "bin" / "sh").symlink_to("/bin/sh")
    (root / "bin" / "env").symlink_to("/usr/bin/env")
    yield Shells(root)


def test_the_shells_tell_what_they_ran(shells: Shells) -> None:
    """Both of them, with words, and what they put into the background."""
    for shell in ("sh", "bash"):
        assert sorted(shells.ran(shell, "a 'x y' '' & b; c || b")) == [("a", "x y", ""), ("b",), ("c",)]
        assert ("b", "x") in shells.ran(shell, "a | b x")


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(line=st.lists(st.sampled_from(PIECES), min_size=1, max_size=9).map("".join), shell=st.sampled_from(["sh", "bash"]))
@example(line="a 2>&1|b", shell="sh")
@example(line="a 'x\ny' \"$(b)\"", shell="bash")
@example(line="a&>/dev/null b", shell="sh")
@example(line="a&>/dev/null b", shell="bash")
def test_a_real_shell_runs_nothing_that_was_not_seen(shells: Shells, line: str, shell: str) -> None:
    """Whatever a shell runs of an arbitrary line is in the parsed one, and so neither allowed by a rule about something else
    nor missed by a rule that denies it."""
    ran = shells.ran(shell, line)
    parsed = parse_line(line)
    if not parsed.opaque:
        for words in ran:
            assert any(_fits(command.words, words) for command in parsed.commands), (parsed, words)
    programs = {words[0] for words in ran}
    if of_command("allow execute(a *)", line) == "allow":
        assert programs <= {"a"}
    if "b" in programs:
        assert of_command("deny execute(b *)\nallow execute(a *)\nallow execute(b *)", line, "allow-all") != "allow"


def _fits(pattern: tuple[str | None, ...], words: tuple[str, ...]) -> bool:
    expression = "".join("(?:[^\x00]*\x00)*" if word is None else re.escape(word) + "\x00" for word in pattern)
    return re.fullmatch(expression, "".join(word + "\x00" for word in words)) is not None


# ------------------------------------------------------------------ a slow reference

WORDS = ["git", "push", "status", "a b", "x;y", "", "é", "*"]
QUOTES = ["{}", "'{}'", '"{}"', "''{}", "{}''"]


def _shown(word: str, how: int) -> str:
    quoted = "'" + word + "'"
    plain = word and all(char.isalnum() and char.isascii() for char in word)
    return QUOTES[how % len(QUOTES)].format(word) if plain else quoted


RULE = st.tuples(
    st.sampled_from(["allow", "ask", "deny"]),
    st.lists(st.sampled_from([*WORDS[:5], None]), max_size=3),
    st.booleans(),
).filter(lambda rule: bool(rule[1] or rule[2]) and (rule[2] or not rule[1] or rule[1][-1] is not None))


@given(
    rules=st.lists(RULE, max_size=6),
    commands=st.lists(st.lists(st.sampled_from(WORDS), min_size=1, max_size=4), min_size=1, max_size=3),
    operators=st.lists(st.sampled_from([";", "&&", "||", "|", "&", "\n", " ; ", " && \n"]), min_size=2, max_size=2),
    how=st.lists(st.integers(0, 4), min_size=4, max_size=4),
    policy=st.sampled_from(["ask", "allow-all", "deny", "allow-edits"]),
)
def test_the_verdict_is_that_of_a_slow_reference(
    rules: list[tuple[str, list[str | None], bool]],
    commands: list[list[str]],
    operators: list[str],
    how: list[int],
    policy: str,
) -> None:
    """Expressions over whole lists of words, every rule tried, the best found by sorting."""
    commands = [command for command in commands if command[0]] or [["git"]]
    text = "\n".join(
        f"{effect} execute({' '.join('*' if word is None else _shown(word, 1) for word in [*words, *([None] * open_end)])})"
        for effect, words, open_end in rules
    )
    line = _shown(commands[0][0], how[0]) + "".join(" " + _shown(word, how[1]) for word in commands[0][1:])
    for command, operator in zip(commands[1:], operators, strict=False):
        line += operator + " ".join(_shown(word, how[2]) for word in command)
    parts = []
    for command in commands:
        found = []
        for effect, words, open_end in rules:
            expression = "".join("[^\x00]*\x00" if word is None else re.escape(word) + "\x00" for word in words)
            expression += "(?:[^\x00]*\x00)*" if open_end else ""
            if re.fullmatch(expression, "".join(word + "\x00" for word in command)):
                literal = sum(word is not None for word in words)
                found.append((literal, len(words) - literal, not open_end, ["allow", "ask", "deny"].index(effect), effect))
        parts.append(max(found)[-1] if found else None)
    expected = {"ask": "ask", "allow-all": "allow", "deny": "deny", "allow-edits": "ask"}[policy]
    if "deny" in parts:
        expected = "deny"
    elif "ask" in parts:
        expected = "deny" if policy == "deny" else "ask"
    elif all(part == "allow" for part in parts):
        expected = "allow"
    assert of_command(text, line, policy) == expected, (text, line)


def _slow(pattern: tuple[str, ...], parts: tuple[str, ...]) -> bool:
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_slow(pattern[1:], parts[count:]) for count in range(len(parts) + 1))
    return bool(parts) and _slow_name(pattern[0], parts[0]) and _slow(pattern[1:], parts[1:])


def _slow_name(pattern: str, name: str) -> bool:
    if not pattern:
        return not name
    if pattern[0] == "*":
        return any(_slow_name(pattern[1:], name[count:]) for count in range(len(name) + 1))
    return bool(name) and pattern[0] in (name[0], "?") and _slow_name(pattern[1:], name[1:])


SEGMENT = st.sampled_from(["**", "*", "a", "b", "a*", "*b", "?", "a?b", ".x"])
NAME = st.sampled_from(["a", "b", "ab", "aab", ".x", "x.y"])


@given(st.lists(SEGMENT, min_size=1, max_size=4).map(tuple), st.lists(NAME, max_size=4).map(tuple))
def test_patterns_of_files_match_as_a_slow_reference(pattern: tuple[str, ...], parts: tuple[str, ...]) -> None:
    """Names, directories above them, and what is below a directory only."""
    assert matches(pattern, parts) == _slow(pattern, parts)
    one_below = pattern[-1] == "**"
    assert matches(pattern, parts, below=True) == (
        any(_slow(pattern[:-1], parts[:count]) for count in range(len(parts))) if one_below else _slow(pattern, parts)
    )
    names = ["a", "b", "ab", "aab", ".x", "x.y"]
    deeper = any(_slow(pattern, (*parts, *more)) for first in names for more in ([first], *([first, other] for other in names)))
    if deeper:
        assert leads_to(pattern, parts)


# ------------------------------------------------------------------ files


class TestFiles:
    """Files are what they are, whatever they are called."""

    @pytest.mark.parametrize(
        ("rules", "path", "verdict"),
        [
            *(("allow edit(src/**)", "src/a", "allow"), ("allow edit(src/**)", "/ws/src/a/b", "allow")),
            *(("allow edit(src/**)", "./src//a", "allow"), ("allow edit(src/**)", "src", "ask")),
            *(("allow edit(src/**)", "src/../a", "ask"), ("allow edit(src/**)", "srcx/a", "ask")),
            *(("allow edit(src/**)", "/etc/passwd", "ask"), ("allow edit(src/**)", "~/src/a", "ask")),
            *(("allow edit(src/**)", "file:///ws/src/a", "ask"), ("allow edit(src/**)", "src/$X", "ask")),
            *(("allow edit(src/**)", "SRC/a", "ask"), ("allow edit(**)", "../x", "ask"), ("allow edit", "/etc/x", "ask")),
            *(
                ("allow edit(*.md)", "a.md", "allow"),
                ("allow edit(*.md)", "a/b.md", "ask"),
                ("allow edit(**/*.md)", "a/b.md", "allow"),
            ),
            *(
                ("allow edit(src/)", "src/a/b", "allow"),
                ("allow edit(a?c)", "abc", "allow"),
                ("allow edit([id].ts)", "[id].ts", "allow"),
            ),
            *(
                ("allow edit([id].ts)", "i.ts", "ask"),
                ("allow edit(**)", ".git/config", "ask"),
                ("allow edit", "x/.GIT/hooks/y", "ask"),
            ),
            *(("allow edit(.git/**)", ".git/config", "allow"), ("allow *", "src/a", "allow"), ("allow *", ".envrc", "ask")),
            *(("allow edit(**)\ndeny edit(secrets/**)", "secrets/x", "deny"), ("deny edit(**)\nallow edit(a)", "a", "allow")),
        ],
    )
    def test_by_name(self, rules: str, path: str, verdict: str) -> None:
        """Allowing needs a plain name inside the workspace; what makes programs run commands must be named."""
        assert judged(rules, request("edit", paths=[path])).verdict == verdict

    @pytest.mark.parametrize(
        "path",
        [
            *(
                "secrets/x",
                "/ws/secrets/x",
                "./secrets/x",
                "a/../secrets/x",
                "secrets//x",
                "secrets/./x",
                "SECRETS/X",
                "Secrets/x",
            ),
            *("secrets", "secrets/", "secrets/a/b", "/ws/../ws/secrets/x", "//ws/secrets/x"),
        ],
    )
    def test_denied_files_by_any_name(self, path: str) -> None:
        """Some file systems do not tell small from capital letters."""
        assert judged("deny edit(secrets/**)\nallow edit(**)", request("edit", paths=[path]), "allow-all").verdict == "deny"

    @pytest.mark.parametrize("path", ["~/x", "$HOME/x", "file:///ws/secrets/x", "a\x00b"])
    def test_a_name_that_may_be_any_file_is_asked_about(self, path: str) -> None:
        """Denying never misses for want of certainty."""
        assert judged("deny edit(secrets/**)", request("edit", paths=[path]), "allow-all").verdict == "ask"

    def test_every_file_counts(self) -> None:
        """Of several, and of those that only a diff names."""
        rules = "allow edit(src/**)\ndeny edit(secrets/**)"
        assert judged(rules, request("edit", paths=["src/a", "src/b"])).verdict == "allow"
        assert judged(rules, request("edit", paths=["src/a", "b"])).verdict == "ask"
        assert judged(rules, request("edit", paths=["src/a", "secrets/b"])).verdict == "deny"
        assert judged(rules, request("edit", paths=["src/a"], diffs=(FileDiff("secrets/b", None, ""),))).verdict == "deny"
        assert judged(rules, request("edit", paths=["a"], cwd="/ws/secrets")).verdict == "deny"
        assert judged(rules, request("edit", paths=["a"], cwd="/ws/src")).verdict == "allow"
        assert judged(rules, request("edit")).verdict == "ask"
        assert judged("deny edit(secrets/**)", request("edit"), "allow-all").verdict == "ask"

    @pytest.mark.parametrize("kind", ["delete", "move", "search"])
    def test_a_directory_above_a_denied_file_is_asked_about(self, kind: ToolKind) -> None:
        """It takes the file along."""
        rules = f"deny {kind}(src/secrets/**)\nallow {kind}"
        assert judged(rules, request(kind, paths=["src"]), "allow-all").verdict == "ask"
        assert judged(rules, request(kind, paths=["."]), "allow-all").verdict == "ask"
        assert judged(rules, request(kind, paths=["docs"]), "allow-all").verdict == "allow"

    def test_files_outside_of_the_workspace_can_be_denied(self) -> None:
        """By absolute patterns, and by those that may begin anywhere."""
        rules = "deny read(/etc/**)\ndeny read(**/.env)"
        assert judged(rules, request("read", paths=["/etc/passwd"]), "allow-all").verdict == "deny"
        assert judged(rules, request("read", paths=["../etc/passwd"]), "allow-all").verdict == "deny"
        assert judged(rules, request("read", paths=["/srv/x/.env"]), "allow-all").verdict == "deny"
        assert judged(rules, request("read", paths=["a/.env"]), "allow-all").verdict == "deny"
        assert judged(rules, request("read", paths=["/srv/x"]), "allow-all").verdict == "allow"
        assert judged("deny read(/ws/a)", request("read", paths=["a"]), "allow-all").verdict == "deny"

    def test_links_are_followed(self, tmp_path: Path) -> None:
        """Both the name and what is behind it count: either is enough to deny, both are needed to allow."""
        root, outside = tmp_path / "ws", tmp_path / "outside"
        for directory in (root / "src", root / "secrets", outside):
            directory.mkdir(parents=True)
        (root / "secrets" / "key").write_text("x")
        (root / "src" / "link").symlink_to("../secrets")
        (root / "src" / "key").symlink_to("../secrets/key")
        (root / "src" / "out").symlink_to(outside)
        (root / "alias").symlink_to("src")
        (tmp_path / "ws2").symlink_to(root)

        def verdict(rules: str, path: str, policy: str = "ask", named: Path = root, kind: ToolKind = "edit") -> str:
            asked = request(kind, paths=[path], cwd=str(named))
            return judge(policy, parse(rules), asked, inside_really(str(named)), names_really(str(named))).verdict

        for named in (root, tmp_path / "ws2"):
            assert verdict("allow edit(src/**)", "src/a", named=named) == "allow"
            assert verdict("allow edit(src/**)", str(named / "src" / "a"), named=named) == "allow"
            for path in ("src/link/key", "src/key", "src/out/x", "src/link/../a", "alias/a", "src/../secrets/key"):
                assert verdict("allow edit(src/**)", path, named=named) == "ask", path
            for path in ("src/link/key", "src/key", "src/link", "src/link/new", str(root / "secrets" / "key")):
                assert verdict("deny edit(secrets/**)", path, "allow-all", named=named) == "deny", path
        assert verdict(f"deny edit({outside}/**)", "src/out/x", "allow-all") == "deny"
        assert verdict("deny delete(secrets/**)", "secrets/key/..", "allow-all", kind="delete") == "deny"
        assert verdict("deny delete(src/link/x)", "alias", "allow-all", kind="delete") == "ask"
        assert verdict("deny delete(**/.env)", "secrets/key", "allow-all", kind="delete") == "allow"

    def test_a_program_behind_a_link_into_the_workspace_is_not_the_workspace(self, tmp_path: Path) -> None:
        """A command's directory is where it really is."""
        root, outside = tmp_path / "ws", tmp_path / "outside"
        root.mkdir()
        outside.mkdir()
        (root / "link").symlink_to(outside)
        asked = request(command="make", cwd=str(root / "link"))
        verdict = judge("ask", parse("allow execute(make)"), asked, inside_really(str(root)), names_really(str(root)))
        assert verdict.verdict == "ask"
