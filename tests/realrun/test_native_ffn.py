"""The native kernel of experts: torch's results but for rounding, on every kind of processor, or torch itself."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import Tensor  # noqa: E402

from realrun.errors import RefusedError  # noqa: E402
from realrun.experts import expert_shape  # noqa: E402
from realrun.experts.expert_ffn import SwiGlu, addressed, compute_into, expert_ffn, weighted_ffn  # noqa: E402
from realrun.experts.expert_layout import ExpertLayout  # noqa: E402
from realrun.experts.expert_shape import ExpertShape  # noqa: E402
from realrun.experts.native_swiglu import NativeSwiGlu  # noqa: E402
from realrun.machine import native_ffn as native  # noqa: E402
from realrun.machine import native_library as library  # noqa: E402
from realrun.machine.machines import facts_of  # noqa: E402
from realrun.machine.native_ffn import CHOICE, SOURCE, NativeFfn, check, cpu_kernel, loaded  # noqa: E402
from realrun.machine.native_library import NotCompiledError, cache_folder, compiled, find_compiler  # noqa: E402
from tests.realrun.test_expert_shape import TOY  # noqa: E402
from tests.realrun.tiny_bench import bench_for, machine, prepared, run, tiny_setting  # noqa: E402

ROOT = Path(__file__).parents[2]
VARIANTS: dict[str, Sequence[str]] = {
    "this processor": (),
    "AVX-512 without BF16": ("-mno-avx512bf16",),
    "AVX2": ("-mno-avx512f",),
    "no vectors but SSE2": ("-mno-avx512f", "-mno-avx2", "-mno-fma"),
}
QUICK = ("-O1",)  # to compile


def has_compiler() -> bool:
    try:
        find_compiler()
    except NotCompiledError:
        return False
    return True


needs_compiler = pytest.mark.skipif(not has_compiler(), reason="no C compiler on PATH")


@lru_cache
def variant(name: str) -> NativeFfn:
    """Skips what is for other processors than this one."""
    try:
        return loaded(SOURCE, VARIANTS[name])
    except NotCompiledError as error:
        pytest.skip(str(error))


class Expert:
    """Weights and inputs that are small multiples of 1/8: gate and up are exact in any order of additions."""

    def __init__(self, hidden: int, width: int, gated: bool, tokens: int, top_k: int, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return (torch.randint(-2, 3, shape, generator=random) / 8).bfloat16()

        layout = ExpertLayout.from_shape(hidden, width, torch.bfloat16, gated)
        self.views = layout.views(torch.zeros(layout.bytes, dtype=torch.uint8))
        for value in self.views.values():
            value.copy_(draw(*value.shape))
        self.x, self.top_k = draw(tokens, hidden) * 8, top_k
        self.choices = torch.randperm(tokens * top_k, generator=random)[:tokens]
        self.weights = torch.rand(tokens * top_k, generator=random)

    def given(self, choices: Tensor | slice | None = None) -> tuple[Any, ...]:
        return self.views, self.x, self.choices if choices is None else choices, self.weights, self.top_k

    def new(self, rows: int | None = None) -> Tensor:
        return torch.full((len(self.choices) if rows is None else rows, self.x.shape[1]), torch.nan)


@st.composite
def experts(draw: st.DrawFn) -> Expert:
    size = st.integers(1, 200)
    return Expert(
        draw(size), draw(size), draw(st.booleans()), draw(st.integers(1, 40)), draw(st.integers(1, 4)),
        draw(st.integers(0, 999)),
    )  # fmt: skip


def spread(expert: Expert, gated: bool) -> Tensor:
    """How much each result may be off: a rounding of itself, and of one inner value where SiLU falls between two."""
    rows = expert.x[expert.choices // expert.top_k]
    views = {name: value.float() for name, value in expert.views.items()}
    inner = rows.float() @ next(iter(views.values())).T
    inner = SwiGlu()._apply_gate(inner) if gated else SwiGlu().act_fn(inner)
    largest = (inner[:, None, :] * views["down_proj"]).abs().amax(-1)
    total = expert_ffn(SwiGlu(gated), views, rows.float()).abs()
    return (2**-7 * (largest + total) + 1e-6) * expert.weights[expert.choices].unsqueeze(1)


@needs_compiler
class TestResults:
    @pytest.mark.parametrize("name", VARIANTS)
    @settings(max_examples=40)
    @given(expert=experts(), threads=st.integers(1, 3))
    def test_are_torchs_but_for_rounding(self, name: str, expert: Expert, threads: int) -> None:
        ffn, gated = variant(name), "gate_up_proj" in expert.views
        first, down = expert.views.values()
        parts = expert.new(len(expert.weights))
        ffn(first, down, *expert.given()[1:], parts, scattered=True, threads=threads)
        expected = weighted_ffn(SwiGlu(gated), *expert.given())
        off = (parts[expert.choices] - expected).abs()
        assert (off <= spread(expert, gated)).all(), float(off.max())
        assert parts.isnan().all(1).sum() == len(expert.weights) - len(expert.choices)  # other rows: as they were

    @pytest.mark.parametrize("name", VARIANTS)
    @settings(max_examples=10)
    @given(expert=experts())
    def test_do_not_depend_on_rows_or_threads(self, name: str, expert: Expert) -> None:
        ffn = variant(name)
        first, down = expert.views.values()

        def computed(choices: Tensor, threads: int) -> Tensor:
            out = expert.new(len(choices))
            ffn(first, down, expert.x, choices, expert.weights, expert.top_k, out, scattered=False, threads=threads)
            return out

        together = computed(expert.choices, 1)
        assert torch.equal(computed(expert.choices, 3), together)
        assert torch.equal(torch.cat([computed(row, 1) for row in expert.choices.split(1)]), together)

    def test_are_right_in_the_memory_of_many_calls_from_several_threads(self) -> None:
        ffn, expert = variant("this processor"), Expert(96, 80, True, 3, 2, 0)
        first, down = expert.views.values()
        expected = expert.new()
        ffn(first, down, *expert.given()[1:], expected, scattered=False, threads=1)
        wrong: list[int] = []

        def call(threads: int) -> None:
            for turn in range(200):
                out = expert.new()
                ffn(first, down, *expert.given()[1:], out, scattered=False, threads=threads)
                if not torch.equal(out, expected):
                    wrong.append(turn)

        callers = [threading.Thread(target=call, args=(threads,)) for threads in (1, 2, 3)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        assert not wrong


@needs_compiler
class TestKernel:
    """``NativeSwiGlu`` among the executor's kernels."""

    def test_computes_rows_into_their_places(self) -> None:
        expert, kernel = Expert(64, 48, True, 5, 2, 1), NativeSwiGlu(ffn=variant("this processor"))
        rows, parts = weighted_ffn(kernel, *expert.given(), expert.new()), expert.new(10)
        compute_into(parts, kernel, *expert.given())
        assert torch.equal(parts[expert.choices], rows)
        one = expert.choices[2:3]
        compute_into(alone := expert.new(10), kernel, *expert.given(addressed(one)))
        assert torch.equal(alone[one], rows[2:3])

    def test_is_used_on_both_lanes_of_a_replay(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: set[str] = set()
        call = NativeFfn.__call__

        def watched(self: NativeFfn, *given: Any, **options: Any) -> None:
            seen.add(threading.current_thread().name)
            call(self, *given, **options)

        monkeypatch.setattr(expert_shape, "native_ffn", lambda: variant("this processor"))
        monkeypatch.setattr(NativeFfn, "__call__", watched)
        setting = tiny_setting(policy="fiddler")
        setting = replace(setting, shape=replace(setting.shape, weight_bits=16.0))
        with machine() as lanes:
            run(bench_for(lanes, [prepared(setting, "fiddler")]), setting, "fiddler")
        assert seen == {"gpu", "cpu"}

    @pytest.mark.parametrize("change", ["rows", "type", "gaps"])
    def test_leaves_to_torch_what_it_is_not_for(self, change: str) -> None:
        expert, ffn = Expert(64, 48, True, 9, 2, 1), variant("this processor")
        if change == "rows":
            monkey = NativeFfn.__new__(NativeFfn)
            monkey.__dict__.update(vars(ffn), only_up_to=8)
            ffn = monkey
        if change == "type":
            expert.views = {name: value.float() for name, value in expert.views.items()}
            expert.x = expert.x.float()
        if change == "gaps":
            expert.x = expert.x.repeat(1, 2)[:, ::2]
        kernel, given = NativeSwiGlu(ffn=ffn), expert.given()
        assert not kernel.compute(*given, expert.new(), scattered=False)
        assert torch.equal(weighted_ffn(kernel, *given, expert.new()), weighted_ffn(SwiGlu(), *given))

    def test_is_of_bfloat16_alone(self) -> None:
        kinds = {bits: type(ExpertShape.of(replace(TOY, weight_bits=bits)).kernel) for bits in (16.0, 32.0)}
        assert kinds == {16.0: NativeSwiGlu, 32.0: SwiGlu}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder of the test's own, and a process that has not chosen its kernel."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(CHOICE, raising=False)
    native.native_ffn.cache_clear()
    yield tmp_path / "trilane"
    native.native_ffn.cache_clear()


class TestChoice:
    @needs_compiler
    def test_is_the_native_kernel_and_a_fact_of_the_machine(self, cache: Path) -> None:
        assert cpu_kernel().startswith("native-")
        with machine() as lanes:
            assert facts_of(lanes)["cpu_kernel"] == cpu_kernel()

    def test_is_torch_where_asked_for(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(CHOICE, "torch")
        assert cpu_kernel() == "torch"
        assert type(ExpertShape.of(TOY).kernel) is SwiGlu
        assert not cache.exists()

    def test_is_torch_without_a_compiler(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "")
        assert cpu_kernel() == "torch"

    def test_is_torch_where_nothing_can_be_kept(self, cache: Path) -> None:
        cache.write_text("a file")
        assert cpu_kernel() == "torch"

    def test_that_cannot_be_is_refused(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "")
        monkeypatch.setenv(CHOICE, "native")
        with pytest.raises(RefusedError, match="TRILANE_CPU_KERNEL=native: expected a C compiler on PATH, found none"):
            cpu_kernel()

    def test_of_something_else_is_refused(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(CHOICE, "fast")
        with pytest.raises(RefusedError, match="TRILANE_CPU_KERNEL: expected torch, native or nothing, got 'fast'"):
            cpu_kernel()


TWINS = {
    "gate and up exchanged": ("rounded(silu(rounded(gate[row][token])))", "rounded(gate[row][token])"),
    "the rest of a row left out": ("if (at < length)", "if (0)"),
    "another token's row": ("/ expert->top_k *", "/ (expert->top_k + 1) *"),
    "not weighted": ("* e->weights[choice]", "* 1"),
    "the last rows of a block": ("row < ROWS && first + row < e->width", "row < ROWS - 1 && first + row < e->width"),
}


@needs_compiler
class TestCheck:
    @pytest.mark.parametrize("twin", TWINS)
    def test_rejects_a_kernel_that_computes_something_else(self, twin: str, cache: Path, tmp_path: Path) -> None:
        text, (right, wrong) = SOURCE.read_text(), TWINS[twin]
        assert right in text
        broken = tmp_path / "broken.c"
        broken.write_text(text.replace(right, wrong))
        with pytest.raises(NotCompiledError, match=r"expected torch's results within 0\.016 of the largest, got"):
            loaded(broken, QUICK)

    def test_of_a_broken_kernel_leaves_torch(
        self, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        broken = tmp_path / "broken.c"
        broken.write_text(SOURCE.read_text().replace("* e->weights[choice]", ""))
        monkeypatch.setattr(native, "loaded", lambda: loaded(broken, QUICK))
        assert cpu_kernel() == "torch"

    def test_fails_for_results_that_are_no_numbers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ffn = NativeFfn.__new__(NativeFfn)
        ffn.name = "idle"
        monkeypatch.setattr(NativeFfn, "__call__", lambda *_, **__: None)
        with pytest.raises(NotCompiledError, match=r"idle: expected torch's results within 0\.016 .*, got nan"):
            check(ffn)


@needs_compiler
class TestCache:
    def test_keeps_one_library_for_the_next_time(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = compiled(SOURCE, QUICK)
        assert [path] == list(cache.iterdir())
        assert stat.S_IMODE(cache.stat().st_mode) == 0o700
        built = path.stat().st_mtime_ns
        assert compiled(SOURCE, QUICK) == path
        assert path.stat().st_mtime_ns == built

    def test_tells_sources_flags_and_processors_apart(
        self, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        other, processor = tmp_path / SOURCE.name, tmp_path / "cpuinfo"
        other.write_text(SOURCE.read_text() + "\n")
        paths = [compiled(SOURCE, QUICK), compiled(SOURCE, ("-O1", "-g")), compiled(other, QUICK)]
        processor.write_text("processor\t: 0\nmodel name\t: Another\nflags\t\t: sse2\n")
        monkeypatch.setattr(library, "CPU_LIST", processor)
        paths.append(compiled(SOURCE, QUICK))
        assert len(set(paths)) == 4

    def test_builds_a_damaged_library_anew(self, cache: Path) -> None:
        path = compiled(SOURCE, QUICK)
        path.write_bytes(b"cut off")
        assert loaded(SOURCE, QUICK).name.startswith("native-")

    def test_serves_processes_that_ask_at_once(self, cache: Path) -> None:
        code = "from realrun.machine.native_ffn import cpu_kernel; print(cpu_kernel())"
        asking = [
            subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
            for _ in range(2)
        ]  # fmt: skip
        names = [process.communicate()[0].strip() for process in asking]
        assert names[0] == names[1] == variant("this processor").name
        assert [path.suffix for path in cache.iterdir()] == [".so"]

    def test_keeps_nothing_of_what_does_not_compile(self, cache: Path, tmp_path: Path) -> None:
        (tmp_path / "broken.c").write_text("int compute(void) { return wrong; }\n")
        with pytest.raises(NotCompiledError, match=r"does not compile broken.c: (?s:.*)wrong"):
            compiled(tmp_path / "broken.c")
        assert not list(cache.iterdir())

    def test_is_in_the_users_home_by_default(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setenv("HOME", os.sep + "home-of-tests")
        assert cache_folder() == Path(os.sep, "home-of-tests", ".cache", "trilane")


def test_the_source_is_installed_with_the_package() -> None:
    import tomllib

    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["realrun"]
    assert any(SOURCE.relative_to(ROOT / "realrun").match(pattern) for pattern in data)
