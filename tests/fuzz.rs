//! What comes from outside, spoilt in every way: bodies and headers, streamed answers, event and transfer frames,
//! admissions, settings. Each target starts from good samples, mutates them with a seeded generator and checks that
//! nothing panics and that what must hold of any input holds (`fuzz/checks.rs`, which the fuzzers in `fuzz/` share).
//!
//! `cargo test --test fuzz` tries a few thousand inputs per target; `FUZZ_SECONDS=600 cargo test --release --test fuzz`
//! runs each target that long, from `FUZZ_SEED` on. A failure names its seed.
#![allow(clippy::unwrap_used)]

#[path = "../fuzz/checks.rs"]
mod checks;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use kvc_router::core::ledger::LedgerEvent;
use kvc_router::core::residency::Change;
use kvc_router::core::types::{BlockHash, SessionId};
use kvc_router::node::transfer::frame::{self, Kind};
use kvc_router::node::transfer::message;
use kvc_router::wire::events::{NodeEvent, Numbered, Snapshot, encode};
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};

/// Inputs per target when nothing else is asked for.
const CASES: u64 = 3000;

/// Runs a target over mutated samples.
fn fuzz(samples: &[Vec<u8>], target: impl Fn(&[u8], &mut SmallRng)) {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let first = number("FUZZ_SEED").unwrap_or(1);
    let until = number("FUZZ_SECONDS").map(|seconds| Instant::now() + Duration::from_secs(seconds));
    let mut seed = first;
    while until.map_or(seed < first + CASES, |until| Instant::now() < until) {
        let mut rng = SmallRng::seed_from_u64(seed);
        let input = mutated(samples, &mut rng);
        let held = catch_unwind(AssertUnwindSafe(|| target(&input, &mut rng)));
        assert!(held.is_ok(), "FUZZ_SEED={seed}, input {:?}", String::from_utf8_lossy(&input));
        seed += 1;
    }
}

fn mutated(samples: &[Vec<u8>], rng: &mut SmallRng) -> Vec<u8> {
    const WORDS: [&[u8]; 12] = [
        b"\"", b"{", b"}", b"[", b"]", b"\\u0000", b"\\ud800", b"null", b"1e999", b"\xff", b"\r\n", b"data: ",
    ];
    let mut bytes = samples[rng.random_range(0..samples.len())].clone();
    for _ in 0..rng.random_range(0..8) {
        let at = rng.random_range(0..=bytes.len());
        let to = rng.random_range(at..=bytes.len().min(at + 32));
        match rng.random_range(0..7) {
            0 if at < bytes.len() => bytes[at] ^= 1 << rng.random_range(0..8),
            1 => drop(bytes.drain(at..to)),
            2 => bytes.truncate(at),
            3 => {
                let piece = bytes[at..to].to_vec();
                bytes.splice(at..at, piece.repeat(rng.random_range(1..20)));
            }
            4 => drop(bytes.splice(at..at, WORDS[rng.random_range(0..WORDS.len())].iter().copied())),
            5 => {
                let other = &samples[rng.random_range(0..samples.len())];
                let from = rng.random_range(0..=other.len());
                bytes.splice(at.., other[from..].iter().copied());
            }
            _ if at + 4 <= bytes.len() => {
                let edge = [0, 1, 0x7fff_ffff, u32::MAX][rng.random_range(0..4usize)];
                bytes[at..at + 4].copy_from_slice(&u32::to_le_bytes(edge));
            }
            _ => {}
        }
    }
    bytes
}

fn bodies() -> Vec<Vec<u8>> {
    [
        r#"{"model":"m","stream":true,"messages":[{"role":"system","content":"s"},{"role":"user","content":[{"type":"text","text":"a\u00e9"}]},{"role":"assistant","content":null,"tool_calls":[{"id":"c1","type":"function","function":{"name":"f","arguments":"{\"x\":1}"}}]},{"role":"tool","tool_call_id":"c1","content":"ok"}],"tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object"}}}],"max_tokens":7,"user":"u"}"#,
        r#"{"model":"m","prompt":["one","two"],"n":2}"#,
        r#"{"model":"m","prompt":[1,2,3]}"#,
        r#"{"model":"m","instructions":"i","input":[{"type":"message","role":"user","content":"x"},{"type":"reasoning","encrypted_content":"e"},{"type":"function_call","call_id":"c","name":"f","arguments":"{}"},{"type":"function_call_output","call_id":"c","output":"o"}],"previous_response_id":"r","prompt_cache_key":"k"}"#,
        r#"{"model":"m","max_tokens":3,"system":[{"type":"text","text":"x-anthropic-billing-header: a"},{"type":"text","text":"s","cache_control":{"type":"ephemeral"}}],"messages":[{"role":"user","content":[{"type":"tool_result","tool_use_id":"t","content":"r"}]}],"metadata":{"user_id":"user_a_account_b_session_c"}}"#,
    ]
    .map(|text| text.as_bytes().to_vec())
    .to_vec()
}

/// Whatever a body is, it is placed or refused; a second look at it finds the same session; an appended turn too.
#[test]
fn identity() {
    fuzz(&bodies(), |body, rng| {
        let value: Vec<u8> = (0..rng.random_range(0..40)).map(|_| rng.random()).collect();
        checks::identity(rng.random(), &value, body);
    });
}

/// What is seen of an answer does not depend on how it is cut.
#[test]
fn streamed_answers() {
    let samples: Vec<Vec<u8>> = [
        "data: {\"id\":\"c1\",\"choices\":[{\"delta\":{\"content\":\"a\",\"tool_calls\":[{\"id\":\"t\"}]}}]}\n\ndata: {\"choices\":[{\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":5,\"completion_tokens\":2,\"prompt_tokens_details\":{\"cached_tokens\":4}}}\n\ndata: [DONE]\n\n",
        "event: message_start\r\ndata: {\"type\":\"message_start\",\"message\":{\"id\":\"m\",\"usage\":{\"input_tokens\":1,\"cache_read_input_tokens\":2}}}\r\n\r\nevent: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"end_turn\"},\"usage\":{\"output_tokens\":9}}\n\n",
        "data: {\"type\":\"response.completed\",\"sequence_number\":4,\"response\":{\"id\":\"r\",\"output\":[{\"call_id\":\"c\"}],\"usage\":{\"input_tokens\":3}}}\n\n",
        "{\"id\":\"x\",\"error\":{\"message\":\"m\"},\"choices\":[{\"message\":{\"tool_calls\":[{\"id\":\"t\"}]},\"finish_reason\":\"tool_calls\"}]}",
    ]
    .map(|text| text.as_bytes().to_vec())
    .to_vec();
    fuzz(&samples, |input, rng| checks::answers(rng.random(), rng.random(), input));
}

/// Frames of the event stream: the same messages however the stream is cut, and what is read can be written again.
#[test]
fn event_frames() {
    let hashes = |n: u64| (0..n).map(BlockHash).collect::<Vec<_>>();
    let change = Change { session: SessionId::new("t/s"), keep: 1, appended: hashes(3), tokens: 99 };
    let changes = vec![
        LedgerEvent::Held(change),
        LedgerEvent::Freed(hashes(2)),
        LedgerEvent::BackedUp(hashes(1)),
        LedgerEvent::BackupDropped(hashes(1)),
    ];
    let snapshot = Snapshot {
        sessions: vec![(SessionId::new("é"), 5, hashes(4))],
        backups: hashes(2),
        ..Snapshot::default()
    };
    let at = |seq, event| encode(&Numbered { epoch: 7, seq, event }).to_vec();
    let first = at(1, NodeEvent::Snapshot(snapshot));
    let second = at(2, NodeEvent::Changes(changes));
    let third = at(2, NodeEvent::Load(Default::default()));
    let all = [first.clone(), second.clone(), third.clone()].concat();
    fuzz(&[first, second, third, all], |input, rng| checks::events(rng.random(), input));
}

/// Frames and messages of a KV transfer: damage is an error, never a panic, and what is read is of the size announced.
#[test]
fn transfer_frames() {
    let block = [7u8; 16];
    let blocks = message::blocks(3, [(BlockHash(1), &block[..]), (BlockHash(2), &block[..])].into_iter());
    let want = message::want(&[true, false, true]);
    let raw = [(Kind::Blocks, b"some kv".to_vec()), (Kind::End, Vec::new()), (Kind::Hello, b"{}".to_vec())];
    let mut samples: Vec<Vec<u8>> = raw.iter().map(|(kind, payload)| frame::frame(*kind, payload)).collect();
    samples.extend([blocks, want]);
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    fuzz(&samples, |input, _| checks::transfers(&runtime, input));
}

/// Admissions and plans: read, or refused with a sentence.
#[test]
fn admissions_and_plans() {
    let head = r#"{"request_id":"r","session":"t/s","turn":1,"input_len":9,"append_len":3,"output_reserve":2,"known":1,"known_hash":5}"#;
    let mut body = (head.len() as u32).to_le_bytes().to_vec();
    body.extend_from_slice(head.as_bytes());
    body.extend_from_slice(&7u64.to_le_bytes());
    let plan = br#"{"leg":"decode","request_id":"r","session":"t/s","mode":"direct","lease_epoch":1,"reuse_blocks":2,"pull":{"transfer_id":"x","from_block":0},"sync":[{"to":"a:1","held":0}]}"#;
    fuzz(&[body, plan.to_vec()], |input, _| checks::admissions(input));
}

/// Settings: valid, or one line that says what is wrong; what is valid reads back the same.
#[test]
fn settings() {
    let samples: Vec<Vec<u8>> = [
        include_str!("../config/paper.toml"),
        "[http]\nlisten = \"a:1\"\nauth = \"open\"\n[fleet]\ndecode = [\"http://a:1\"]\n[algorithm]\npreset = \"paper\"\nrho = 0.5\n",
        "team 2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b inflight=8 rpm=6 admin\n# x\n",
    ]
    .map(|text| text.as_bytes().to_vec())
    .to_vec();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("settings.toml");
    fuzz(&samples, |input, _| checks::settings(&path, input));
}
