use super::*;
use crate::core::residency::common_prefix;

const LINE: &str = r#"{"session":"a","parent":null,"kind":"main","models":["m"],"block":64,"shared_prefix_tokens":128,
"turns":[{"t":0.0,"in":200,"out":10,"gap":0.0,"api":2.5,"stop":"tool_use","h":[[1,3]]},
{"t":10.0,"in":330,"out":70,"stop":"","h":[[1,3],[9,2]]}]}"#;

fn text(line: &str) -> String {
    line.replace('\n', "")
}

fn fails(text: &str) -> String {
    parse("t", text).expect_err("bad input was accepted")
}

#[test]
fn a_session_line_is_read() {
    let trace = parse("t", &text(LINE)).unwrap();
    let s = &trace.sessions[0];
    assert_eq!((trace.block, s.turns.len(), s.shared_prefix), (64, 2, 128));
    // A missing gap is what lies between the answer and the next turn.
    assert_eq!((s.turns[1].gap, s.turns[1].at, s.turns[0].stop), (7_500_000, 10_000_000, StopKind::ToolUse));
}

#[test]
fn bad_input_names_line_and_field() {
    let good = text(LINE);
    let second = |bad: &str| format!("{}\n{bad}", good.replace("\"a\"", "\"b\""));
    for (from, to, says) in [
        ("\"in\":200", "\"in\":-200", "field `turns[0].in`"),
        ("\"in\":200", "\"in\":20000", "field `turns[0].h`"),
        ("\"out\":10", "\"out\":1e3", "field `turns[0].out`"),
        ("\"out\":70", "\"out\":700000000", "field `turns[1].out`"),
        ("\"gap\":0.0", "\"gap\":-1.0", "field `turns[0].gap`"),
        ("\"t\":10.0", "\"t\":-3", "field `turns[1].t`"),
        ("tool_use", "magic", "field `turns[0].stop`"),
        ("\"block\":64", "\"block\":0", "field `block`"),
        ("\"session\":\"a\",", "", "missing field `session`"),
        ("\"t\":0.0", "\"t\":11.0", "field `turns[1].t`"),
        ("\"api\":2.5", "\"api\":-2.5", "field `turns[0].api`"),
        ("\"api\":2.5", "\"api\":1e30", "field `turns[0].api`"),
        ("[[1,3]]", "[[18446744073709551615,3]]", "field `turns[0].h`"),
        ("\"main\"", "\"zz\"", "field `kind`"),
        ("tokens\":128", "tokens\":1000000000000", "field `shared_prefix_tokens`"),
        ("[[1,3]]", "[[1,\"x\"]]", "field `turns[0].h[0][1]`"),
    ] {
        assert!(good.contains(from));
        let message = fails(&second(&good.replacen(from, to, 1)));
        assert!(message.starts_with("line 2: ") && message.contains(says), "{to}: {message}");
    }
    assert!(fails(&format!("{good}\n{good}")).contains("appears twice"));
    assert!(fails(&second("{\"session\":")).starts_with("line 2: "));
    assert!(fails("").contains("no request"));
}

#[test]
fn a_truncated_archive_names_the_line() {
    use std::io::Write as _;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.sessions.jsonl.gz");
    let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    gz.write_all(text(LINE).as_bytes()).unwrap();
    let bytes = gz.finish().unwrap();
    std::fs::write(&path, &bytes[..bytes.len() - 9]).unwrap();
    let message = Trace::read(&[&path]).unwrap_err();
    assert!(
        message.contains("t.sessions.jsonl.gz: line ") && message.contains("cannot be read"),
        "{message}"
    );
    assert!(Trace::read(&[dir.path().join("absent")]).unwrap_err().contains("absent"));
}

#[test]
fn sub_agents_find_their_parent_in_any_order() {
    let parent = text(LINE);
    let child = parent
        .replace("\"a\"", "\"c\"")
        .replace("\"parent\":null", "\"parent\":\"a\",\"parent_turn\":1,\"start\":12.5");
    let trace = parse("t", &format!("{child}\n{parent}")).unwrap();
    assert_eq!((trace.sessions[0].parent, trace.sessions[0].delay), (Some((1, 1)), 2_500_000));
    assert_eq!(trace.sessions[0].family, trace.sessions[1].family);
    // One that starts after the last recorded turn starts beside it.
    let late = child.replace("\"parent_turn\":1", "\"parent_turn\":7");
    assert_eq!(parse("t", &format!("{parent}\n{late}")).unwrap().sessions[1].parent, Some((0, 1)));
    let lost = child.replace("\"parent_turn\":1,", "");
    assert!(fails(&format!("{parent}\n{lost}")).contains("line 2: field `parent_turn`"));
}

#[test]
fn mooncake_requests_become_sessions() {
    let lines = r#"{"timestamp":0,"input_length":1100,"output_length":5,"hash_ids":[1,2,3]}
{"timestamp":500,"input_length":1030,"output_length":0,"hash_ids":[7,8,9]}
{"timestamp":9000,"input_length":1600,"output_length":5,"hash_ids":[1,2,4,5]}"#;
    let trace = parse("m", lines).unwrap();
    assert_eq!((trace.block, trace.sessions.len(), trace.turns()), (512, 2, 3));
    assert_eq!(trace.sessions[0].turns[1].runs, [(1, 2), (4, 1)]);
    let named = lines.replace("\"timestamp\"", "\"session_id\":\"s\",\"delay\":250,\"timestamp\"");
    let trace = parse("m", &named).unwrap();
    assert_eq!((trace.sessions.len(), trace.sessions[0].turns[2].gap), (1, 250_000));
    assert!(fails(&lines.replace("[7,8,9]", "[7]")).contains("line 2: field `hash_ids`"));
    let back = named.replace(":9000", ":100");
    assert!(fails(&back).contains("line 3: field `timestamp`"));
    assert!(fails(&lines.replace(":1600", ":-1")).contains("line 3: field `input_length`"));
}

fn spec(name: &str, group: u64, runs: &[&[(u64, u32)]]) -> SessionSpec {
    let turn = |runs: &&[(u64, u32)]| TurnSpec {
        at: 0,
        input: 0,
        output: 1,
        gap: 0,
        stop: StopKind::Unknown,
        runs: runs.to_vec(),
    };
    SessionSpec {
        name: name.into(),
        parent: None,
        delay: 0,
        family: xxhash_rust::xxh3::xxh3_64(name.as_bytes()),
        group,
        shared_prefix: 256,
        turns: runs.iter().map(turn).collect(),
    }
}

/// Equal hash ⇔ equal prefix, over sessions and turns.
#[test]
fn chains_share_exactly_the_shared_prefix() {
    let a = spec("a", 1, &[&[(1, 10)], &[(1, 8), (50, 4)], &[(90, 1), (2, 9)]]);
    let (b, c) = (spec("b", 1, &[&[(1, 10)]]), spec("c", 2, &[&[(1, 10)]]));
    let first = |s: &SessionSpec, sharing| Chain::new(s, sharing, 64, 1).advance(&s.turns[0]);
    let shared = |x, y, sharing| common_prefix(&first(x, sharing), &first(y, sharing));
    assert_eq!(shared(&a, &b, SharedPrefix::Group), 4);
    assert_eq!(shared(&a, &c, SharedPrefix::Group), 0);
    assert_eq!(shared(&a, &c, SharedPrefix::All), 4);
    assert_eq!(shared(&a, &b, SharedPrefix::None), 0);
    let mut chain = Chain::new(&a, SharedPrefix::Group, 64, 1);
    let turns: Vec<_> = a.turns.iter().map(|t| chain.advance(t)).collect();
    assert_eq!(common_prefix(&turns[0], &turns[1]), 8);
    assert_eq!(common_prefix(&turns[0], &turns[2]), 0);
    // A block of two holds the second hash of each pair.
    let mut coarse = Chain::new(&a, SharedPrefix::Group, 64, 2);
    let pairs = coarse.advance(&a.turns[0]);
    assert_eq!((pairs.len(), pairs[1]), (5, turns[0][3]));
}

#[test]
fn answers_extend_the_chain() {
    let s = spec("a", 1, &[&[(1, 4)], &[(1, 9)], &[(1, 3), (70, 5)]]);
    let mut chain = Chain::new(&s, SharedPrefix::Group, 64, 1);
    let t: Vec<_> = s.turns.iter().map(|t| chain.advance(t)).collect();
    assert_eq!(with_answer(&t[0], Some(&t[1]), 6, 1)[..], t[1][..6]);
    // The next prompt dropped the answer: its blocks are nobody else's.
    let own = with_answer(&t[0], Some(&t[2]), 6, 1);
    assert_eq!((common_prefix(&own, &t[0]), common_prefix(&own, &t[2]), own.len()), (4, 3, 6));
    assert_ne!(own[5], with_answer(&t[0], None, 6, 2)[5]);
    assert_eq!(with_answer(&t[0], None, 3, 1), t[0]);
}
