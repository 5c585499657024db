//! The 240 recorded dispatches of the specification, replayed.

#![allow(clippy::unwrap_used)]

use std::io::Read;

use flate2::read::GzDecoder;

fn vectors() -> String {
    let mut json = String::new();
    let bytes = &include_bytes!("data/dispatch-vectors.json.gz")[..];
    GzDecoder::new(bytes).read_to_string(&mut json).unwrap();
    json
}

#[test]
fn every_vector_is_met() {
    let (text, met) = kvc_router::explain::run(&vectors()).unwrap();
    let differing: Vec<&str> = text.lines().filter(|l| l.contains("DIFFERENCE")).collect();
    assert!(met, "{}\n{:#?}", text.lines().last().unwrap_or_default(), &differing[..differing.len().min(5)]);
    assert!(text.ends_with("240 cases, 240 of 240 with an expectation meet it\n"));
}

/// The comparison can fail: a changed expectation is found and named.
#[test]
fn a_difference_is_reported() {
    let mut cases: serde_json::Value = serde_json::from_str(&vectors()).unwrap();
    cases[3]["expect"]["after"]["assigned"]["d0"] = 77.into();
    let (text, met) = kvc_router::explain::run(&cases.to_string()).unwrap();
    assert!(!met && text.contains("DIFFERENCE after"), "{text}");
    assert!(text.ends_with("240 cases, 239 of 240 with an expectation meet it\n"));
}

#[test]
fn bad_input_is_named() {
    let err = |json: &str| kvc_router::explain::run(json).unwrap_err();
    assert!(err("{").contains("not a list"));
    assert!(err("[]").contains("no case"));
    let mut case: serde_json::Value =
        serde_json::from_str::<serde_json::Value>(&vectors()).unwrap()[0].clone();
    case["settings"]["rho"] = 2.into();
    assert!(err(&format!("[{case}]")).contains("settings.rho = 2"));
    case["settings"] = serde_json::json!({"rhoo": 1});
    assert!(err(&format!("[{case}]")).contains("rhoo"));
    case["settings"] = serde_json::json!({});
    case["session"]["pin"] = "d9".into();
    assert!(err(&format!("[{case}]")).contains("d9"));
}

/// R3: a block behind a hole counts for `set`, not for `prefix`: no engine can reuse it. Mirrors have no holes,
/// recorded states may.
#[test]
fn overlap_by_set_and_by_prefix() {
    let score = |overlap: &str| {
        let case = serde_json::json!({
            "name": "hole", "settings": {"overlap": overlap}, "prefill": [],
            "workers": [{"id": "d0", "k_d": 9000, "resident": [1, 2, 4], "inflight": 0, "assigned": 0}],
            "session": {"id": "s", "turn": 0, "pin": null},
            "request": {"prefix_hashes": [1, 2, 3, 4], "append_len": 5},
        });
        let record = serde_json::from_value(case).unwrap();
        kvc_router::explain::decide(&record).unwrap().attempts[0].scores["d0"][0]
    };
    assert_eq!((score("set"), score("prefix")), (3, 2));
}
