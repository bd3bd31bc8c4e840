"""The data of a sweep's pictures: the right means of the right rows, and remarks on the rest."""

from __future__ import annotations

import json
from itertools import product

import pandas as pd
import pytest

from tests.kit.pictures import CHANGES, results, run, seer, two_shares
from trilane.output.figures.figure_files import PictureError
from trilane.output.figures.marks import marked
from trilane.output.figures.sweep_means import fastest_first, means_of
from trilane.output.figures.sweep_pictures import KINDS, FigureOptions, axes_for, pictures_of

NO_SEER = "these results hold no clairvoyant run, which would show how much is left to gain"


def test_means_lowest_and_highest_of_draws() -> None:
    means = means_of(two_shares(draws=2))
    assert means.axes == {"cached_share": [0.2, 0.8]}
    assert means.notes == ()
    rows = means.rows[means.rows["policy"] == "dali"]
    assert rows[["cached_share", "tpot_ms", "tpot_ms_min", "tpot_ms_max", "draws"]].to_numpy().tolist() == [
        [0.2, 60.0, 40.0, 80.0, 2], [0.8, 15.0, 10.0, 20.0, 2],
    ]
    assert means.bounds.to_numpy().tolist() == [[0.2, 5.0], [0.8, 3.0]]


def test_the_frame_behind_a_picture_whole() -> None:
    assert means_of(two_shares()).frame().to_csv(index=False).splitlines() == [
        "policy,kind,cached_share,tpot_ms,tpot_ms_min,tpot_ms_max,draws",
        "oracle,clairvoyant,0.2,8.0,8.0,8.0,1",
        "oracle,clairvoyant,0.8,6.0,6.0,6.0,1",
        "fiddler,keeps the routing,0.2,20.0,20.0,20.0,1",
        "fiddler,keeps the routing,0.8,18.0,18.0,18.0,1",
        "dali,keeps the routing,0.2,40.0,40.0,40.0,1",
        "dali,keeps the routing,0.8,10.0,10.0,10.0,1",
        "lower bound,lower bound,0.2,5.0,,,",
        "lower bound,lower bound,0.8,3.0,,,",
    ]


def test_the_bound_is_the_lowest_of_a_setting_and_policies_that_change_the_routing_have_none() -> None:
    rows = [run("a", 9.0, lower_bound_tpot_ms=5.0), run("b", 9.0, lower_bound_tpot_ms=4.5), run("c", 3.0, **CHANGES)]
    means = means_of(results(rows=rows))
    assert means.bounds["tpot_ms"].tolist() == [4.5]
    assert [marked(*row) for row in means.rows[["policy", "kind"]].to_numpy().tolist()] == ["a", "b", "c ~"]


def test_axes_are_what_was_varied_and_does_not_follow_from_another() -> None:
    """The model follows from the trace; the batch was varied over one value; overrides were not varied."""
    rows = [
        run("a", 1.0, trace=trace, model=f"model of {trace}", pcie_gbps=rate, hardware_overrides=f'{{"x":{rate}}}')
        for trace in ("x", "y")
        for rate in (16.0, 8.0)
    ]
    means = means_of(results("trace", "model", "pcie_gbps", "batch", rows=rows))
    assert means.axes == {"trace": ["x", "y"], "pcie_gbps": [8.0, 16.0]}
    asked = means_of(results("pcie_gbps", rows=rows[:2]), asked=["batch"])
    assert asked.axes == {"pcie_gbps": [8.0, 16.0], "batch": [1]}


def test_one_policy_with_several_parameters_makes_an_axis() -> None:
    rows = [run("a", 1.0, parameters=json.dumps({"window": window})) for window in (1, 2)]
    assert list(means_of(results("parameters", rows=rows)).axes) == ["parameters"]


def test_parameters_are_shortened_to_what_differs_and_policies_with_one_set_are_at_every_value() -> None:
    dali = [run("dali", 4.0 + n, parameters=json.dumps({"evict": "idlest", "window": n})) for n in (2, 8)]
    means = means_of(results("parameters", rows=[*dali, run("fiddler", 9.0, parameters='{"uniform":false}')]))
    assert means.rows[["parameters", "policy", "tpot_ms"]].to_numpy().tolist() == [
        ["window=2", "dali", 6.0], ["window=8", "dali", 12.0],
        ["window=2", "fiddler", 9.0], ["window=8", "fiddler", 9.0],
    ]
    assert means_of(results("parameters", rows=dali), {"parameters": ["window=8"]}).real["tpot_ms"].tolist() == [12.0]


def test_several_parameters_on_the_axis_policy_are_policies_of_their_own() -> None:
    """Once, both settings were called dali in every table and picture."""
    rows = [
        run("dali", 4.0 + n, batch=batch, parameters=json.dumps({"evict": "idlest", "window": n}))
        for n in (2, 8) for batch in (1, 2)
    ]
    means = means_of(results("batch", rows=[*rows, run("fiddler", 9.0, batch=1), run("fiddler", 9.0, batch=2)]))
    assert list(means.axes) == ["batch"]
    assert list(dict.fromkeys(means.rows["policy"])) == ["dali{window: 2}", "dali{window: 8}", "fiddler"]


def test_a_policy_without_the_parameter_is_the_same_at_all_its_values() -> None:
    rows = [run("dali", 5.0 + window, **{"parameters.window": window}) for window in (1.0, 2.0)]
    means = means_of(results("parameters.window", rows=[*rows, seer(3.0, **{"parameters.window": None})]))
    assert means.clairvoyant[["parameters.window", "tpot_ms"]].to_numpy().tolist() == [[1.0, 3.0], [2.0, 3.0]]


def test_one_grid_after_the_other_invents_nothing_and_loses_nothing() -> None:
    """The cached share in one, the card's memory in the other: what was played, and no other rows."""
    rows = [run("dali", 10.0 * share, cached_share=share) for share in (0.2, 0.8)]
    rows += [run("dali", 1.0 * size, cached_share=None, gpu_memory_gb=size) for size in (8.0, 16.0)]
    means = means_of(results("cached_share", "gpu_memory_gb", rows=rows))
    assert means.axes == {"cached_share": [0.2, 0.8, "what fits"], "gpu_memory_gb": [8.0, 16.0, "the card's own"]}
    assert means.rows[["cached_share", "gpu_memory_gb", "tpot_ms"]].to_numpy().tolist() == [
        [0.2, "the card's own", 2.0], [0.8, "the card's own", 8.0], ["what fits", 8.0, 8.0], ["what fits", 16.0, 16.0],
    ]
    assert means_of(results("cached_share", "gpu_memory_gb", rows=rows), {"gpu_memory_gb": ["null"]}).axes == {
        "cached_share": [0.2, 0.8]
    }


def windows() -> pd.DataFrame:
    """dali with two windows; then dali with its own and fiddler, which has no window."""
    rows = [run("dali", 5.0 + window, **{"parameters.window": window}) for window in (2.0, 8.0)]
    return results("parameters.window", rows=[*rows, run("dali", 6.0), run("fiddler", 9.0)])


def test_a_run_with_the_default_is_a_value_of_its_own() -> None:
    means = means_of(windows())
    assert means.axes == {"parameters.window": [2.0, 8.0, "default"]}
    assert means.rows[["parameters.window", "policy", "tpot_ms"]].to_numpy().tolist() == [
        [2.0, "dali", 7.0], [8.0, "dali", 13.0], ["default", "dali", 6.0],
        [2.0, "fiddler", 9.0], [8.0, "fiddler", 9.0], ["default", "fiddler", 9.0],
    ]


def test_parameters_of_hidden_policies_are_no_axis() -> None:
    means = means_of(windows(), policies=["fiddler"])
    assert means.axes == {}
    assert means.rows["tpot_ms"].tolist() == [9.0]


def test_which_policies_have_a_parameter_is_judged_on_all_rows() -> None:
    """With window 8 alone fiddler stays; with the default alone dali is not spread over windows that it skipped."""
    assert means_of(windows(), {"parameters.window": ["8"]}).rows["policy"].tolist() == ["dali", "fiddler"]
    assert means_of(windows(), {"parameters.window": ["null"]}).rows["tpot_ms"].tolist() == [6.0, 9.0]


def test_a_policy_without_a_parameter_is_only_in_settings_that_others_played() -> None:
    """dali's windows were played with batch 1 alone."""
    rows = [run("dali", 5.0, **{"parameters.window": window}) for window in (2.0, 8.0)]
    rows += [run("fiddler", 9.0), run("fiddler", 18.0, batch=4)]
    means = means_of(results("parameters.window", "batch", rows=rows))
    fiddler = means.rows[means.rows["policy"] == "fiddler"]
    assert fiddler[["parameters.window", "batch", "tpot_ms"]].to_numpy().tolist() == [
        [2.0, 1, 9.0], [8.0, 1, 9.0], ["default", 4, 18.0],
    ]


def test_null_is_a_value_even_if_it_is_the_only_one() -> None:
    assert means_of(results("model", rows=[run("dali", 5.0, model=None)]), asked=["model"]).axes == {
        "model": ["the trace's own"]
    }


@pytest.mark.parametrize("where", [None, {"policy": ["oracle"]}])
def test_only_the_clairvoyant_run_is_left(where: dict[str, list[str]] | None) -> None:
    rows = [run("dali", None, error="BudgetError: 2 GB are missing"), seer(5.0)]
    error = "" if where else "; the others ended with an error, the first: BudgetError: 2 GB are missing"
    with pytest.raises(PictureError, match=f"only clairvoyant runs are left{error}$"):
        means_of(results(rows=rows), where)


def test_several_values_of_a_key_mean_either() -> None:
    rows = [run("dali", 5.0, batch=batch) for batch in (1, 2, 4)]
    assert means_of(results("batch", rows=rows), {"batch": ["1", "4"]}).axes == {"batch": [1, 4]}


def test_errors_are_left_out_and_counted() -> None:
    failed = run("dali", None, cached_share=0.9, error="BudgetError: 2 GB are missing")
    means = means_of(results("cached_share", rows=[run("dali", 5.0), run("dali", 9.0, cached_share=0.2), failed]))
    assert means.axes == {"cached_share": [0.2, 0.5]}
    left = "left out: 1 of 3 runs, which ended with an error (such as BudgetError: 2 GB are missing)"
    assert means.notes == (left, NO_SEER)


def test_a_setting_in_which_a_draw_failed_is_no_mean() -> None:
    rows = [run("dali", 5.0), run("dali", 7.0, draw=1), run("lru", 5.0), run("lru", None, draw=1, error="E: no")]
    means = means_of(results(rows=rows))
    assert means.rows["policy"].tolist() == ["dali"]
    assert "left out: 1 runs of settings in which not every draw ran" in means.notes


def test_no_setting_with_all_draws() -> None:
    rows = [run("dali", 5.0), run("lru", 7.0, draw=1)]
    with pytest.raises(PictureError, match="all 2 draws ran, there is none"):
        means_of(results(rows=rows))


def test_policies_that_were_tuned_on_these_sequences_are_named() -> None:
    rows = [run("best-exact", 5.0), run("dali", 6.0)]
    assert "best-exact was tuned on sequences 0 to 9" in "\n".join(means_of(results(rows=rows)).notes)
    assert "best-exact" not in "\n".join(means_of(results(rows=rows), policies=["dali"]).notes)
    held_out = [{**row, "sequences": "[12, 13]"} for row in rows]
    assert means_of(results(rows=held_out)).tuned == ""


def test_policies_are_chosen_and_clairvoyant_runs_stay() -> None:
    means = means_of(two_shares(), policies=["dali"])
    assert set(means.rows["policy"]) == {"dali", "oracle"}
    assert len(means.bounds) == 2


@pytest.mark.parametrize("text", ["0.2", "20%", ".20"])
def test_where_reads_values_as_they_are_written(text: str) -> None:
    means = means_of(two_shares(), {"cached_share": [text]})
    assert means.axes == {}
    assert means.real["tpot_ms"].tolist() == [40.0, 20.0]


@pytest.mark.parametrize(
    ("where", "message"),
    [({"cached_share": ["0.3"]}, "cached_share=0.3: .*: 20%, 80%"),
     ({"bach": ["1"]}, "no key 'bach'; did you mean 'batch'")],
)
def test_where_refuses_what_is_not_there(where: dict[str, list[str]], message: str) -> None:
    with pytest.raises(PictureError, match=message):
        means_of(two_shares(), where)


def test_unknown_policies_and_nothing_to_draw() -> None:
    with pytest.raises(PictureError, match="no policy in these results 'dalli'; did you mean 'dali'"):
        means_of(two_shares(), policies=["dalli"])
    with pytest.raises(PictureError, match=r"got none of 1 \(such as E: no\)"):
        means_of(results(rows=[run("dali", None, error="E: no")]))


@pytest.mark.parametrize(("change", "expected"), [
    ({}, "deepseek-v2-lite on rtx3090-ddr4, 50% of the experts cached, batch 1, 24 generated tokens, "
     "routing of mini-deepseek, 1 draw"),
    ({"cached_share": None}, "deepseek-v2-lite on rtx3090-ddr4, the card's own memory, batch 1, "
     "24 generated tokens, routing of mini-deepseek, 1 draw"),
    ({"cached_share": None, "gpu_memory_gb": 12.0, "labels": '["synthetic trace"]'},
     "deepseek-v2-lite on rtx3090-ddr4, 12 GB of GPU memory, batch 1, 24 generated tokens, "
     "routing of mini-deepseek, synthetic trace, 1 draw"),
])
def test_what_was_run(change: dict[str, object], expected: str) -> None:
    assert means_of(results(rows=[run("dali", 5.0, **change)])).about == expected


@pytest.mark.parametrize(("axes", "change", "expected"), [
    ((), {"prompt_tokens": 16.0}, "50% of the experts cached, batch 1, 16+24 tokens, routing"),
    ((), {"hardware_overrides": '{"host.sync_ns":1,"gpu.flops_per_s":2}'}, "rtx3090-ddr4, 2 numbers of the machine "
     "changed, 50%"),
    ((), {"engine": "graphs"}, "on rtx3090-ddr4, engine graphs, 50%"),
    ((), {"engine_overrides": '{"software.layer_ns":1}'}, "rtx3090-ddr4, 1 number of the engine changed, 50%"),
    ((), {"engine": "pytorch"}, "on rtx3090-ddr4, engine pytorch, 50%"),
    ((), {"prefill_chunk_tokens": 64.0}, "24 generated tokens, prefill chunk 64 tokens, routing"),
    ((), {"prefill_chunk_tokens": None}, "24 generated tokens, routing"),
    (("engine",), {"engine": "graphs"}, "on rtx3090-ddr4, 50%"),
    (("gpu.memory_bytes",), {"gpu.memory_bytes": 8e9, "cached_share": None}, "on rtx3090-ddr4, batch 1, 24"),
])
def test_the_engine_always_and_what_is_not_as_by_default(
    axes: tuple[str, ...], change: dict[str, object], expected: str
) -> None:
    assert expected in means_of(results(*axes, rows=[run("dali", 5.0, **change)]), asked=axes).about


def test_what_varies_is_not_named_as_fixed() -> None:
    assert means_of(two_shares()).about == (
        "deepseek-v2-lite on rtx3090-ddr4, batch 1, 24 generated tokens, routing of mini-deepseek, 1 draw"
    )


def test_fastest_first_by_the_ratio_to_the_best_of_each_setting() -> None:
    """a is 1x and 4x the best (mean 2x), b 3x and 1x (1.73x): b comes first, though a's sum of times is smaller."""
    rows = pd.DataFrame({"batch": [1, 1, 2, 2], "policy": ["a", "b", "a", "b"], "tpot_ms": [10.0, 30.0, 4.0, 1.0]})
    assert fastest_first(rows) == ["b", "a"]


# --- Every picture that results allow, and why not the others ---------------------------------------------------------


def test_one_axis_allows_all_but_the_heat_map() -> None:
    pictures, reasons = pictures_of(means_of(two_shares()), KINDS, FigureOptions())
    assert list(pictures) == ["tpot", "speedup", "hits"]
    assert list(reasons) == ["heat"]
    assert "2 axes" in reasons["heat"]
    assert reasons["heat"].endswith(": cached_share")


@pytest.mark.parametrize(("options", "expected"), [
    (FigureOptions(), ["cached_share", "batch", "pcie"]),  # before numbers, before names
    (FigureOptions(y="pcie"), ["cached_share", "pcie", "batch"]),
    (FigureOptions(x="pcie"), ["pcie", "cached_share", "batch"]),
    (FigureOptions(x="batch", y="pcie"), ["batch", "pcie", "cached_share"]),
])
def test_axes_are_found_or_given(options: FigureOptions, expected: list[str]) -> None:
    rows = [
        run("dali", 10.0, batch=batch, cached_share=share, pcie=link)
        for batch, share, link in product((1, 4, 8), (0.2, 0.8), ("4x16", "5x16"))
    ]
    assert axes_for(means_of(results("pcie", "batch", "cached_share", rows=rows)), options, 3) == expected


def test_nothing_but_the_policy_varies() -> None:
    means = means_of(results(rows=[run("dali", 10.0), run("fiddler", 20.0)]))
    pictures, reasons = pictures_of(means, KINDS, FigureOptions())
    assert list(pictures) == ["speedup"]
    assert reasons["tpot"].endswith(": none")


@pytest.mark.parametrize(("options", "message"), [
    (FigureOptions(x="policy"), "--x: .*'policy'; choose from cached_share"),
    (FigureOptions(y="cache_share"), "--y: .*did you mean 'cached_share'"),
    (FigureOptions(x="cached_share", y="cached_share"), "expected two axes, got one twice"),
    (FigureOptions(baseline="nope"), "--baseline: there is no policy in these results 'nope'"),
])
def test_names_are_checked_before_anything_is_drawn(options: FigureOptions, message: str) -> None:
    with pytest.raises(PictureError, match=message):
        pictures_of(means_of(two_shares()), ["hits"], options)
