//! The Responses and the Messages API, and scripted answers in all of them.

use kvc_router::node::{Node, reference_text};
use kvc_router::prompt::Api;
use serde_json::{Value, json};

use super::world::*;

/// `(event, data)` of a stream whose events have names.
fn named(answer: &Answer) -> Vec<(String, Value)> {
    let events = answer.body.split_terminator("\n\n").map(|event| {
        let (name, data) = event.split_once('\n').unwrap();
        let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        let name = name.strip_prefix("event: ").unwrap();
        assert_eq!(data["type"], name);
        (name.to_owned(), data)
    });
    events.collect()
}

/// The names of events, repeated ones once.
fn order(events: &[(String, Value)]) -> Vec<&str> {
    let mut names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
    names.dedup();
    names
}

async fn ask(node: &Node, path: &str, body: &Value) -> Answer {
    let answer = post(node, path, "application/json", body.to_string()).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    answer
}

fn script() -> Value {
    json!([
        {"text": "I look – gleich.", "tool_calls": [{"name": "ls", "arguments": {"path": "a b", "all": true}}]},
        {"text": "Done: ünïcode."},
    ])
}

#[tokio::test]
async fn responses_stream_and_not() {
    let d = decode().await;
    let body = |stream: bool| json!({"model": MODEL, "instructions": "be brief", "input": words("responses", 200), "stream": stream});
    let reference = reference_text(MODEL, Api::Responses, body(false).to_string().as_bytes()).unwrap();
    let whole = ask(&d, "/v1/responses", &body(false)).await.json();
    assert_eq!((&whole["object"], &whole["status"]), (&json!("response"), &json!("completed")));
    assert_eq!(whole["output"][0]["content"][0]["text"], reference);
    let usage = &whole["usage"];
    assert_eq!(
        usage["total_tokens"],
        usage["input_tokens"].as_u64().unwrap() + usage["output_tokens"].as_u64().unwrap()
    );

    let answer = ask(&d, "/v1/responses", &body(true)).await;
    let events = named(&answer);
    let expected = [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ];
    assert_eq!(order(&events), expected);
    assert!(events.iter().enumerate().all(|(i, (_, data))| data["sequence_number"] == i));
    let deltas: String = events.iter().filter_map(|(_, data)| data["delta"].as_str()).collect();
    let response = &events.last().unwrap().1["response"];
    assert_eq!(
        (deltas.as_str(), response["output"][0]["content"][0]["text"].as_str()),
        (&*reference, Some(&*reference))
    );
    assert!(response["usage"]["input_tokens_details"]["cached_tokens"].as_u64() > Some(0));

    let mut short = body(true);
    short["max_output_tokens"] = 3.into();
    let events = named(&ask(&d, "/v1/responses", &short).await);
    let (name, last) = events.last().unwrap();
    assert_eq!(
        (name.as_str(), &last["response"]["incomplete_details"]["reason"]),
        ("response.incomplete", &json!("max_output_tokens"))
    );
}

#[tokio::test]
async fn messages_stream_and_not() {
    let d = decode().await;
    let body = |stream: bool| {
        let messages = json!([{"role": "user", "content": words("messages", 200)}]);
        json!({"model": MODEL, "system": "be brief", "messages": messages, "stream": stream, "max_tokens": 1000})
    };
    let reference = reference_text(MODEL, Api::Messages, body(false).to_string().as_bytes()).unwrap();
    let counted = ask(&d, "/v1/messages/count_tokens?beta=true", &body(false)).await.json();
    let whole = ask(&d, "/v1/messages", &body(false)).await.json();
    assert_eq!((&whole["type"], &whole["stop_reason"]), (&json!("message"), &json!("end_turn")));
    assert_eq!(whole["content"], json!([{"type": "text", "text": reference}]));
    assert_eq!(whole["usage"]["input_tokens"], counted["input_tokens"]);

    let events = named(&ask(&d, "/v1/messages", &body(true)).await);
    let expected = [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ];
    assert_eq!(order(&events), expected);
    let text: String = events.iter().filter_map(|(_, data)| data["delta"]["text"].as_str()).collect();
    assert_eq!(text, reference);
    let usage = &events[0].1["message"]["usage"];
    let (new, cached) =
        (usage["input_tokens"].as_u64().unwrap(), usage["cache_read_input_tokens"].as_u64().unwrap());
    assert!(cached > 0 && Some(new + cached) == counted["input_tokens"].as_u64());
}

#[tokio::test]
async fn a_scripted_tool_loop_is_an_append_in_every_api() {
    let d = decode().await;
    let marked = format!("{} [[kvc-script: {}]]", words("script", 300), script());
    for (n, stream) in [(0, false), (1, true)] {
        let user = json!({"role": "user", "content": format!("{n} {marked}")});
        chat_loop(&d, user.clone(), stream).await;
        responses_loop(&d, user.clone(), stream).await;
        messages_loop(&d, user, stream).await;
    }
    at_rest(&d).await;
}

async fn chat_loop(d: &Node, user: Value, stream: bool) {
    let tools = json!([{"type": "function", "function": {"name": "ls"}}]);
    let mut body = json!({"model": MODEL, "tools": tools, "messages": [user], "stream": stream,
        "stream_options": {"include_usage": true}});
    let first = ask(d, "/v1/chat/completions", &body).await;
    assert_eq!(first.text(), "I look – gleich.");
    let call = if stream {
        let events = first.events();
        assert_eq!(events[events.len() - 2]["choices"][0]["finish_reason"], "tool_calls");
        events[events.len() - 3]["choices"][0]["delta"]["tool_calls"][0].clone()
    } else {
        first.json()["choices"][0]["message"]["tool_calls"][0].clone()
    };
    assert_eq!(call["function"]["arguments"], r#"{"all":true,"path":"a b"}"#);
    let (prompt, out, _) = first.usage();
    let messages = body["messages"].as_array_mut().unwrap();
    messages.push(json!({"role": "assistant", "content": first.text(), "tool_calls": [call]}));
    messages.push(json!({"role": "tool", "tool_call_id": call["id"], "content": "a\nb"}));
    let second = ask(d, "/v1/chat/completions", &body).await;
    assert_eq!(second.text(), "Done: ünïcode.");
    assert_eq!(second.usage().2, (prompt + out) / 24 * 24, "all of the answer's whole blocks are held");
}

async fn responses_loop(d: &Node, user: Value, stream: bool) {
    let tools = json!([{"type": "function", "name": "ls"}]);
    let mut body = json!({"model": MODEL, "tools": tools, "input": [user], "stream": stream});
    let response = async |body: &Value| {
        let answer = ask(d, "/v1/responses", body).await;
        if stream { named(&answer).pop().unwrap().1["response"].clone() } else { answer.json() }
    };
    let first = response(&body).await;
    let output = first["output"].as_array().unwrap();
    assert_eq!(
        (output.len(), &output[1]["type"], &output[1]["name"]),
        (2, &json!("function_call"), &json!("ls"))
    );
    let input = body["input"].as_array_mut().unwrap();
    input.extend(output.iter().cloned());
    input.push(json!({"type": "function_call_output", "call_id": output[1]["call_id"], "output": "a\nb"}));
    let second = response(&body).await;
    assert_eq!(second["output"][0]["content"][0]["text"], "Done: ünïcode.");
    let held = first["usage"]["total_tokens"].as_u64().unwrap() / 24 * 24;
    assert_eq!(second["usage"]["input_tokens_details"]["cached_tokens"], held);
}

async fn messages_loop(d: &Node, user: Value, stream: bool) {
    let tools = json!([{"name": "ls", "input_schema": {}}]);
    let mut body =
        json!({"model": MODEL, "max_tokens": 1000, "tools": tools, "messages": [user], "stream": stream});
    let first = ask(d, "/v1/messages", &body).await;
    let (content, usage) = if stream {
        let events = named(&first);
        let deltas = |key: &str| -> String {
            events.iter().filter_map(|(_, data)| data["delta"][key].as_str()).collect()
        };
        let mut call = events
            .iter()
            .map(|(_, data)| &data["content_block"])
            .find(|b| b["type"] == "tool_use")
            .unwrap()
            .clone();
        call["input"] = serde_json::from_str(&deltas("partial_json")).unwrap();
        let usage = events[events.len() - 2].1["usage"].clone();
        (json!([{"type": "text", "text": deltas("text")}, call]), usage)
    } else {
        assert_eq!(first.json()["stop_reason"], "tool_use");
        (first.json()["content"].clone(), first.json()["usage"].clone())
    };
    assert_eq!(content[1]["input"], json!({"path": "a b", "all": true}));
    let messages = body["messages"].as_array_mut().unwrap();
    messages.push(json!({"role": "assistant", "content": content}));
    let result = json!({"type": "tool_result", "tool_use_id": content[1]["id"], "content": "a\nb"});
    messages.push(json!({"role": "user", "content": [result]}));
    body["stream"] = false.into();
    let second = ask(d, "/v1/messages", &body).await.json();
    assert_eq!(second["content"][0]["text"], "Done: ünïcode.");
    let held: u64 = ["input_tokens", "cache_read_input_tokens", "output_tokens"]
        .iter()
        .map(|key| usage[key].as_u64().unwrap())
        .sum();
    assert_eq!(second["usage"]["cache_read_input_tokens"], held / 24 * 24);
}

#[tokio::test]
async fn tools_can_be_insisted_on_in_every_api() {
    let d = decode().await;
    let any = json!({"model": MODEL, "max_tokens": 1000, "tools": [{"name": "ls"}, {"name": "cat"}],
        "messages": [{"role": "user", "content": "x"}], "tool_choice": {"type": "any"}});
    let content = ask(&d, "/v1/messages", &any).await.json()["content"].clone();
    assert_eq!((&content[1]["name"], &content[1]["input"]), (&json!("ls"), &json!({})));
    let named = json!({"model": MODEL, "tools": [{"type": "function", "name": "ls"}, {"type": "function", "name": "cat"}],
        "input": "x", "tool_choice": {"type": "function", "name": "cat"}});
    assert_eq!(ask(&d, "/v1/responses", &named).await.json()["output"][1]["name"], "cat");
}

#[tokio::test]
async fn errors_speak_their_api_and_kept_state_is_refused() {
    let d = decode().await;
    let answer =
        post(&d, "/v1/messages?beta=true", "application/json", r#"{"model":"x","messages":[]}"#).await;
    let error = answer.json();
    assert_eq!(
        (answer.status.as_u16(), &error["type"], &error["error"]["type"]),
        (404, &json!("error"), &json!("not_found_error"))
    );
    for field in ["previous_response_id", "conversation"] {
        let body = json!({"model": MODEL, "input": "x", field: "resp_1"}).to_string();
        let answer = post(&d, "/v1/responses", "application/json", body).await;
        assert_eq!((answer.status.as_u16(), answer.code().as_str()), (400, "invalid_request"));
    }
}
