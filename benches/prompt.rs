//! What identity, lanes and hashing cost a request: first and second turn at 2 KB, 400 KB and 2 MB.
//! The floors in the same run: one pass that looks for quotes and backslashes, a check of the body's grammar
//! (`RawValue`), one hash of it by either crate, and parsing it into a `serde_json::Value`. Also what a translation to chat costs.

use std::hash::Hasher as _;
use std::hint::black_box;

use criterion::measurement::WallTime;
use criterion::{BatchSize, BenchmarkGroup, Criterion, Throughput, criterion_group, criterion_main};
use kvc_router::prompt::{Api, read};
use kvc_router::sessions::{Answer, Headers, Incoming, Limits, Registry};
use kvc_router::translate;
use serde_json::value::RawValue;
use serde_json::{Value, json};
use twox_hash::xxhash3_64;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

const SIZES: [(&str, usize); 3] = [("2KB", 2 << 10), ("400KB", 400 << 10), ("2MB", 2 << 20)];

/// Code as it stands in a request: an escape every 25 bytes.
fn code(bytes: usize, seed: usize) -> String {
    let mut text = String::with_capacity(bytes + 64);
    for line in 0.. {
        if text.len() >= bytes {
            break;
        }
        match line % 4 {
            0 => text.push_str(&format!("    let value_{} = read(\"{line}\", {});\n", seed + line, line * 7)),
            _ => text.push_str(&format!("    value_{}.update(row, &columns[{line}]);\n", seed + line)),
        }
    }
    text.truncate(bytes);
    text
}

/// A chat of about `bytes`: system, calls and 4 KB tool outputs, then tools; keys in the order clients send them.
fn body(bytes: usize, extra: usize) -> Vec<u8> {
    let message = |role: &str, text: &str| format!(r#"{{"role":"{role}","content":{}}}"#, json!(text));
    let system = code((bytes / 20).min(30_000), 1);
    let mut messages = vec![message("system", &system), message("user", "fix the bug")];
    let piece = 4096.min(bytes / 2);
    for turn in 0..bytes / (piece + 350) + extra {
        let id = format!("call_{turn:08}a");
        let call = format!(
            r#"{{"id":"{id}","type":"function","function":{{"name":"bash","arguments":"{{\"command\":\"ls\"}}"}}}}"#
        );
        messages.push(format!(r#"{{"role":"assistant","content":"Looking.","tool_calls":[{call}]}}"#));
        messages.push(format!(
            r#"{{"role":"tool","tool_call_id":"{id}","content":{}}}"#,
            json!(code(piece, turn))
        ));
    }
    let tool = |i: usize| json!({"type": "function", "function": {"name": format!("tool_{i}"), "description": code(400, i), "parameters": {"type": "object"}}});
    let tools: Vec<Value> = (0..(bytes / 40_000).clamp(1, 30)).map(tool).collect();
    format!(
        r#"{{"model":"m","messages":[{}],"tools":{},"stream":true,"max_tokens":1000}}"#,
        messages.join(","),
        json!(tools)
    )
    .into_bytes()
}

fn incoming(body: &[u8]) -> Incoming<'_> {
    const HEADERS: &[(&str, &[u8])] = &[
        ("host", b"router"),
        ("authorization", b"Bearer sk-something"),
        ("content-type", b"application/json"),
        ("user-agent", b"opencode/1.0"),
        ("x-session-affinity", b"ses_dd6905154ffeOG6S07h4iX3e5J"),
        ("x-session-id", b"ses_dd6905154ffeOG6S07h4iX3e5J"),
    ];
    Incoming { path: "/v1/chat/completions", headers: Headers(HEADERS), body }
}

fn turns(c: &mut Criterion) {
    for (name, bytes) in SIZES {
        let (first, second) = (body(bytes, 0), body(bytes, 1));
        let mut group = c.benchmark_group(name);
        group.sample_size(50).throughput(Throughput::Bytes(second.len() as u64));
        floors(&mut group, &first);
        group.bench_function("read", |b| b.iter(|| read(Api::Chat, black_box(&first), &())));
        group.bench_function("first turn", |b| {
            b.iter_batched_ref(
                || Registry::new(Limits::default()),
                |registry| registry.begin(&incoming(&first), 0),
                BatchSize::PerIteration,
            );
        });
        group.bench_function("second turn", |b| {
            let prepare = || {
                let mut registry = Registry::new(Limits::default());
                if let Ok(turn) = registry.begin(&incoming(&first), 0) {
                    let answer = Answer { ok: true, ..Answer::default() };
                    registry.commit(&turn, &answer, 0);
                }
                registry
            };
            b.iter_batched_ref(
                prepare,
                |registry| registry.begin(&incoming(&second), 1),
                BatchSize::PerIteration,
            );
        });
        let responses = as_responses(&first);
        group.bench_function("translate responses", |b| {
            b.iter(|| translate::request(Api::Responses, black_box(&responses)));
        });
        group.finish();
    }
}

fn floors(group: &mut BenchmarkGroup<'_, WallTime>, body: &[u8]) {
    group.bench_function("quotes", |b| {
        b.iter(|| memchr::memchr2_iter(b'"', b'\\', black_box(body)).count());
    });
    group.bench_function("raw value", |b| {
        b.iter(|| serde_json::from_slice::<&RawValue>(black_box(body)).is_ok())
    });
    group.bench_function("xxh3", |b| b.iter(|| xxh3_64(black_box(body))));
    group.bench_function("xxh3 in pieces", |b| {
        b.iter(|| {
            let mut hash = Xxh3::new();
            hash.update(black_box(body));
            hash.digest()
        });
    });
    group.bench_function("xxh3 in pieces by twox-hash", |b| {
        b.iter(|| {
            let mut hash = xxhash3_64::Hasher::new();
            hash.write(black_box(body));
            hash.finish()
        });
    });
    group.bench_function("serde_json value", |b| {
        b.iter(|| serde_json::from_slice::<Value>(black_box(body)));
    });
}

/// The same conversation as a request of the Responses API.
fn as_responses(chat: &[u8]) -> Vec<u8> {
    let chat: Value = serde_json::from_slice(chat).unwrap_or_default();
    let text = |message: &Value| json!([{"type": "input_text", "text": message["content"]}]);
    let mut items = Vec::new();
    for message in chat["messages"].as_array().into_iter().flatten() {
        match message["role"].as_str() {
            Some("tool") => items
                .push(json!({"type": "function_call_output", "call_id": message["tool_call_id"],
                "output": message["content"]})),
            Some("assistant") => {
                items.push(json!({"role": "assistant", "content": text(message)}));
                let call = &message["tool_calls"][0];
                items.push(json!({"type": "function_call", "call_id": call["id"], "name": "bash",
                    "arguments": call["function"]["arguments"]}));
            }
            role => items.push(json!({"role": role, "content": text(message)})),
        }
    }
    let tools = chat["tools"].as_array().into_iter().flatten().map(|tool| {
        let mut flat = tool["function"].clone();
        flat["type"] = "function".into();
        flat
    });
    json!({"model": "m", "input": items, "tools": tools.collect::<Value>(), "stream": true})
        .to_string()
        .into_bytes()
}

criterion_group!(benches, turns);
criterion_main!(benches);
