//! The recorded cases of real clients: each request on the lane it belongs to.

use kvc_router::sessions::identify::run;

const VECTORS: &str = include_str!("data/identity-vectors.json");

#[test]
fn recorded_clients() {
    let (report, good) = run(VECTORS).expect("vectors");
    assert!(good, "{report}");
}

/// What no recording shows: each source, odd ids, and the ways prompts change. `@long` stands for a system text that
/// makes a conversation worth a place.
#[test]
fn made_up_clients() {
    let cases =
        include_str!("data/identity-more.json").replace("@long", &"You are a coding agent. ".repeat(220));
    let (report, good) = run(&cases).expect("cases");
    assert!(good, "{report}");
}

#[test]
fn what_has_no_body_is_nobodys_turn() {
    let list =
        r#"[{"path": "/v1/models"}, {"path": "/v1/messages", "body": {"model": "m", "messages": []}}]"#;
    let (report, good) = run(list).expect("a list");
    assert!(!good && report.lines().count() == 2, "{report}");
    assert!(report.starts_with("0 /v1/models 400 ") && report.contains("\n1 /v1/messages src=-"), "{report}");
}

#[test]
fn a_plain_list_of_requests() {
    let list = r#"[
        {"path": "/v1/chat/completions", "headers": {"X-Session-Id": "s"}, "body": {"model": "m", "messages": []}},
        {"path": "/v1/models", "headers": {}, "body": {}}]"#;
    let (report, good) = run(list).expect("a list");
    let lines: Vec<&str> = report.lines().collect();
    assert!(lines[0].contains("src=x-session-id key=s strength=exact lane=1 how=new t=0"), "{report}");
    assert!(lines[1].contains("/v1/models 400 "), "{report}");
    assert!(!good && lines.len() == 2, "{report}");
}

#[test]
fn what_cannot_be_routed_is_a_failure() {
    for expect in ["", r#", "expect": {}"#, r#", "expect": {"t": 0}"#] {
        let case = format!(
            r#"[{{"name": "n", "steps": [{{"path": "/v1/chat/completions", "headers": {{}}, "body": {{"model": "m"}}{expect}}}]}}]"#
        );
        let (report, good) = run(&case).expect("a case");
        assert!(!good && report.contains("400 ") && report.contains("messages"), "{report}");
    }
    let plain = r#"[{"path": "/v1/messages", "headers": {}, "body": {"model": "m", "messages": []}}]"#;
    assert!(run(plain).expect("a list").1);
}

#[test]
fn a_difference_is_told() {
    let case = r#"[{"name": "n", "steps": [{"path": "/v1/chat/completions", "headers": {},
        "body": {"model": "m", "messages": []}, "expect": {"t": 0, "key": "x", "lane": 7}}]}]"#;
    let (report, good) = run(case).expect("a case");
    assert!(!good && report.contains("differs: key is null, expected \"x\""), "{report}");
    assert_eq!(report.matches("differs").count(), 1, "{report}");
    assert!(run("{}").is_err());
}

#[test]
fn a_list_without_requests_is_an_error() {
    for input in ["[]", r#"[{"name":"x","steps":[]}]"#] {
        let error = kvc_router::sessions::identify::run(input).unwrap_err();
        assert!(error.contains("no request"), "{error}");
    }
}
