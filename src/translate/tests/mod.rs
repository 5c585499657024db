//! Requests as agents send them, answers as engines stream them.

mod messages;
mod refusals;
mod responses;

use serde_json::{Value, json};

use super::*;
use crate::prompt::{canonical, read};

/// The chat body of a request.
fn chat(api: Api, body: &Value) -> Value {
    let translated = request(api, body.to_string().as_bytes()).unwrap().unwrap();
    serde_json::from_slice(&translated.body).unwrap()
}

/// Feeds a stream in pieces of every size, which must not matter; gives what came out.
fn streamed(api: Api, body: &Value, chunks: &[Value]) -> String {
    let sse: String = chunks.iter().map(|chunk| format!("data: {chunk}\n\n")).collect();
    let sse = sse.replace("data: \"DONE\"", "data: [DONE]");
    let mut all = Vec::new();
    for size in [1, 7, 100, sse.len()] {
        let mut answer = request(api, body.to_string().as_bytes()).unwrap().unwrap().answer;
        let mut out = String::new();
        for piece in sse.as_bytes().chunks(size) {
            out += &answer.feed(piece).unwrap();
        }
        all.push(out + &answer.end().unwrap());
    }
    assert!(all.iter().all(|one| *one == all[0]));
    all.remove(0)
}

/// An answer in one piece.
fn whole(api: Api, body: &Value, completion: &Value) -> Value {
    let mut answer = request(api, body.to_string().as_bytes()).unwrap().unwrap().answer;
    assert_eq!(answer.feed(completion.to_string().as_bytes()).unwrap(), "");
    serde_json::from_str(&answer.end().unwrap()).unwrap()
}

/// Events as `(name, data)`; the name stands in both places.
fn events(stream: &str) -> Vec<(String, Value)> {
    let event = |text: &str| {
        let (name, data) = text.split_once('\n').unwrap();
        let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        let name = name.strip_prefix("event: ").unwrap().to_owned();
        assert_eq!(data["type"], name);
        (name, data)
    };
    stream.split_terminator("\n\n").map(event).collect()
}

/// A chunk with this delta.
fn delta(delta: Value) -> Value {
    json!({"id": "chatcmpl-7", "object": "chat.completion.chunk", "created": 5, "model": "m",
        "choices": [{"index": 0, "delta": delta, "finish_reason": null}]})
}

fn finish(reason: &str) -> Value {
    json!({"id": "chatcmpl-7", "created": 5, "model": "m", "choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
}

fn usage() -> Value {
    json!({"id": "chatcmpl-7", "created": 5, "model": "m", "choices": [], "usage": {"prompt_tokens": 100,
        "completion_tokens": 9, "total_tokens": 109, "prompt_tokens_details": {"cached_tokens": 96},
        "completion_tokens_details": {"reasoning_tokens": 4}}})
}

/// What vLLM streams for a model that thinks, speaks and calls twice.
fn thinking_and_calls() -> Vec<Value> {
    let call = |index: usize, id: Option<&str>, name: Option<&str>, arguments: &str| {
        let mut call = json!({"index": index, "function": {"arguments": arguments}});
        if let (Some(id), Some(name)) = (id, name) {
            call["id"] = id.into();
            call["type"] = "function".into();
            call["function"]["name"] = name.into();
        }
        delta(json!({"tool_calls": [call]}))
    };
    vec![
        delta(json!({"role": "assistant", "content": ""})),
        delta(json!({"reasoning_content": "I must "})),
        delta(json!({"reasoning_content": "look."})),
        delta(json!({"content": "Let me "})),
        delta(json!({"content": "see – ✓"})),
        call(0, Some("call_a1b2c3d4"), Some("ls"), ""),
        call(0, None, None, "{\"path\""),
        call(1, Some("call_e5f6a7b8"), Some("cat"), "{\"n\":"),
        // Pieces of both calls, mixed.
        call(0, None, None, ": \"a b\"}"),
        call(1, None, None, "1}"),
        finish("tool_calls"),
        usage(),
        json!("DONE"),
    ]
}

fn completion() -> Value {
    let call = |id: &str, name: &str, arguments: &str| json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
    json!({"id": "chatcmpl-7", "object": "chat.completion", "created": 5, "model": "m", "usage": usage()["usage"],
        "choices": [{"index": 0, "finish_reason": "tool_calls", "stop_reason": null, "message": {"role": "assistant",
            "reasoning_content": "I must look.", "content": "Let me see – ✓", "tool_calls": [
                call("call_a1b2c3d4", "ls", "{\"path\": \"a b\"}"), call("call_e5f6a7b8", "cat", "{\"n\":1}")]}}]})
}

/// Each body begins with the one before, in chat's canonical form too.
fn grows(api: Api, bodies: &[Value]) {
    let text = |body: &Value| canonical(Api::Chat, chat(api, body).to_string().as_bytes()).unwrap();
    for pair in bodies.windows(2) {
        let (before, after) = (text(&pair[0]), text(&pair[1]));
        assert!(after.len() > before.len() && after.starts_with(&before), "{}", pair[1]);
    }
    for body in bodies {
        let chat = chat(api, body).to_string();
        read(Api::Chat, chat.as_bytes(), &()).unwrap();
    }
}

#[test]
fn chat_needs_no_translation() {
    for api in [Api::Chat, Api::Completions] {
        assert!(request(api, b"not even JSON").unwrap().is_none());
    }
}

#[test]
fn a_stream_that_is_cut_is_not_ended_well() {
    let body = json!({"model": "m", "input": "x", "stream": true});
    let mut answer = request(Api::Responses, body.to_string().as_bytes()).unwrap().unwrap().answer;
    answer.feed(format!("data: {}\n\n", delta(json!({"content": "half"}))).as_bytes()).unwrap();
    assert_eq!(answer.end(), Err(Broken("it ended early")));
    let mut answer = request(Api::Responses, body.to_string().as_bytes()).unwrap().unwrap().answer;
    assert!(answer.feed(b"data: {oops}\n\n").is_err());
    // An engine that forgets `[DONE]` has ended all the same.
    let mut answer = request(Api::Responses, body.to_string().as_bytes()).unwrap().unwrap().answer;
    answer.feed(format!("data: {}\n\n", finish("stop")).as_bytes()).unwrap();
    assert!(answer.end().unwrap().contains("response.completed"));
}
