//! `kvc-router replay` from the outside: exit codes, reports, cost tables, a run cut short.
#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use clap::Parser as _;
use kvc_router::replay::cli::{self, ReplayArgs};
use kvc_router::replay::exec::{self, Unit};
use kvc_router::replay::policy;
use kvc_router::replay::report;
use kvc_router::replay::settings::Setting;
use kvc_router::replay::sim::Control;
use kvc_router::replay::trace::Trace;
use serde_json::Value;

#[derive(clap::Parser)]
struct Line {
    #[command(flatten)]
    replay: ReplayArgs,
}

fn sample() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("traces/sample.sessions.jsonl.gz")
}

/// Exit code of `kvc-router replay ARGS`.
fn replay(args: &[&str]) -> i32 {
    cli::run(&Line::try_parse_from([&["replay"], args].concat()).unwrap().replay)
}

fn text(path: &Path) -> String {
    path.to_str().unwrap().to_owned()
}

#[test]
fn bad_input_exits_2_and_leaves_no_report() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, bytes: &[u8]| {
        let path = dir.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        text(&path)
    };
    let good = text(&sample());
    let gz = std::fs::read(sample()).unwrap();
    let cut = file("cut.sessions.jsonl.gz", &gz[..gz.len() / 2]);
    let empty = file("empty.sessions.jsonl", b"");
    let wrong = file("wrong.toml", b"prefill_linear = -1.0");
    let json = text(&dir.path().join("report.json"));
    for bad in [
        &["--trace", &cut][..],
        &["--trace", &empty],
        &["--trace", "absent.jsonl"],
        &["--trace", &good, "--policies", "nonsense"],
        &["--trace", &good, "--set", "rho=7"],
        &["--trace", &good, "--cost", &wrong],
        &["--trace", &good, "--cost", "absent.toml"],
        &["--trace", &good, "--block", "65"],
        &["--trace", &good, "--decode", "0"],
    ] {
        assert_eq!(replay(&[bad, &["--json", &json]].concat()), 2, "{bad:?}");
        assert!(!Path::new(&json).exists(), "{bad:?}");
    }
}

/// A machine from a file: its figures are in the report, and a slower one is slower.
#[test]
fn a_cost_table_is_used_and_reported() {
    let dir = tempfile::tempdir().unwrap();
    let p50 = |linear: f64| {
        let (table, json) = (dir.path().join("m.toml"), dir.path().join("r.json"));
        let rest = "prefill_quadratic = 0.0\nprefill_fixed = 4.0\ndecode_base = 6.0\ndecode_per_running = 0.1\n\
                    decode_per_pool = 6.0\nkv_bytes_per_token = 98304.0\nlink_bytes_per_ms = 25e6\n\
                    link_latency = 1.0\nchunk_tokens = 2048\n";
        std::fs::write(&table, format!("prefill_linear = {linear}\n{rest}")).unwrap();
        let (trace, table, out) = (text(&sample()), text(&table), text(&json));
        let args = ["--trace", &trace, "--policies", "kvc", "--cost", &table, "--json", &out];
        assert_eq!(replay(&[&args[..], &["--set", "lab.warmup=0"]].concat()), 0);
        let report: Value = serde_json::from_str(&std::fs::read_to_string(&json).unwrap()).unwrap();
        assert_eq!(report["setting"]["cost"]["prefill_linear"], linear);
        report["results"][0]["ttft_ms"]["p90"].as_f64().unwrap()
    };
    assert!(p50(0.1) > 2.0 * p50(0.02));
}

/// The page stands alone, every chart is drawn, every number is one.
#[test]
fn pages_are_complete() {
    let dir = tempfile::tempdir().unwrap();
    let (page, map) = (dir.path().join("p.html"), dir.path().join("s.html"));
    let (trace, one, two) = (text(&sample()), text(&page), text(&map));
    let policies = ["--policies", "kvc,ppd,dp-lpwl"];
    let set = ["--set", "lab.warmup=0"];
    assert_eq!(replay(&[&["--trace", &trace, "--html", &one][..], &policies, &set].concat()), 0);
    let cells = ["--kv-list", "92104,300000", "--session-list", "4,8"];
    let args = [&["sweep", "--trace", &trace, "--html", &two][..], &cells, &policies, &set].concat();
    assert_eq!(replay(&args), 0);
    for path in [page, map] {
        let html = std::fs::read_to_string(&path).unwrap();
        assert!(html.contains("<svg") && html.matches("<svg").count() == html.matches("</svg>").count());
        assert!(["kvc", "ppd", "dp-lpwl"].iter().all(|p| html.contains(p)));
        for bad in ["NaN", "inf\"", "http-equiv", "<script src", "<link"] {
            assert!(!html.contains(bad), "{bad} in {}", path.display());
        }
    }
}

/// Ctrl-C: what is done is reported, marked as partial, and nothing else.
#[test]
fn a_run_cut_short_is_a_valid_report() {
    let trace = Trace::read(&[sample()]).unwrap();
    let setting = Setting { seeds: 3, ..Setting::default() };
    let units: Vec<Unit> = (0..3).map(|seed| Unit { setting: setting.clone(), seed }).collect();
    let policies = policy::list("kvc,ppd").unwrap();
    let control = Control::default();
    let after_one = |_: usize, _: &[report::Outcome]| control.stop.store(true, Ordering::Relaxed);
    let outcomes = exec::run(&trace, &units, &policies, 1, &control, &after_one).concat();
    assert_eq!(outcomes.len(), 2);
    let results = report::summarise(&["kvc", "ppd"], &outcomes);
    let json = report::json(&trace.name, &setting, &results, true);
    assert_eq!((json["partial"].as_bool(), json["results"].as_array().unwrap().len()), (Some(true), 2));
}
