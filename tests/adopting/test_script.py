"""Scripts read word by word as bash reads them, without running anything."""

import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.interop.arguments import Script

PARTS = st.sampled_from(
    ("2", "a b", "'c  d'", '"$A"', "$A", "${B}", '"${L[@]}"', "${L[@]}", "x$A", '"e $B"', "\\ f",
     "'$A'", "${U:-7}", "h#i", "'it'\\''s'", '"\\"q\\""')
)  # fmt: skip
STATEMENTS = st.one_of(
    st.builds("A={}".format, st.sampled_from(("1", "'y'", '"$B"', "$B", "p$B", '"u v"'))),
    st.just('M=(5 6)\nC="run --word ${M[@]} $A"\n$C'),
    st.builds("export B={};".format, st.sampled_from(("3", "'z'", "$A", '"n"', "${U:-5}"))),
    st.builds("L=({} {})".format, PARTS, PARTS),
    st.builds("L+=({}) # more".format, PARTS),
    st.builds("run --word {} \\\n {}".format, PARTS, PARTS),
    st.just("# a comment with ' and )"),
    st.just("cat <<END\nit's ( no word\nEND"),
)


@given(st.lists(STATEMENTS, max_size=8))
def test_words_are_those_that_bash_gives_a_command(statements: list[str]) -> None:
    """Values with spaces are left whole here, where bash splits them outside quotes; strings of
    options lose their quotes here, as if they were evaluated."""
    script = "\n".join(["A=1 B=2 L=(0)", "A=1; B=2; L=(0)", *statements, "run --end"])
    prelude = "run() { printf '%s\\n' \"$@\"; }; cat() { :; }; "
    done = subprocess.run(
        ["bash", "-c", prelude + script], capture_output=True, text=True, check=True, env={}
    )
    read = Script.of(script)
    assert all(word.is_literal for word in read.words if "'$A'" not in script)
    ours = " ".join(word.text for word in read.commands if word.text != "run")
    assert ours.split() == done.stdout.split()


@pytest.mark.parametrize(
    "script",
    [
        "for A in 1 2; do run --a $A; done",
        "case $1 in x) A=2;; esac; run --a $A",
        "f() {\nrun --a 2\n}",
        "A=$(nproc); run --a $A",
        "A=`nproc`; run --a $A",
        "A=$((2 * 3)); run --a $A",
        "A=${B%x}; run --a $A",
        "run --a $1",
        "true || A=(2); run --a ${A[@]}",
    ],
)
def test_what_would_have_to_be_executed_is_marked(script: str) -> None:
    words = Script.of(script).words
    assert "--a" in [word.text for word in words]
    assert not words[-1].is_literal
