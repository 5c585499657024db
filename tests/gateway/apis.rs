//! Tool loops through the whole router in each API, by clients that send no id at all.

use super::*;

/// Three answers, the first two with a call.
fn task(api: &str) -> String {
    let call = |path: &str| json!({"text": "I look.", "tool_calls": [{"name": "look", "arguments": {"path": path}}]});
    let script = json!([call("a"), call("b"), {"text": "Done."}]);
    format!("{api}: {} [[kvc-script: {script}]]", "please look at the files, ".repeat(300))
}

async fn post(world: &World, path: &str, body: &Value) -> (StatusCode, HeaderMap, Value) {
    let request = Request::post(format!("{}{path}", world.url));
    let (status, headers, body) = send(request, body.to_string().into()).await;
    (status, headers, serde_json::from_slice(&body).unwrap())
}

/// Runs a loop of three requests; `items` is the field that grows, `next` what an answer adds to it.
async fn tool_loop(
    world: &World,
    path: &str,
    mut body: Value,
    items: &str,
    next: impl Fn(&Value) -> Vec<Value>,
) -> Value {
    let (mut modes, mut sessions) = (Vec::new(), Vec::new());
    loop {
        let (status, headers, answer) = post(world, path, &body).await;
        assert_eq!(status, StatusCode::OK, "{answer}");
        modes.push(mode(&headers).to_owned());
        sessions.push(headers["x-kvc-session"].clone());
        let new = next(&answer);
        if new.is_empty() {
            assert_eq!(modes, ["seed", "direct", "direct"], "{path}");
            assert!(sessions.iter().all(|session| *session == sessions[0]));
            return answer;
        }
        body[items].as_array_mut().unwrap().extend(new);
    }
}

fn after_chat(answer: &Value) -> Vec<Value> {
    let message = &answer["choices"][0]["message"];
    let Some(call) = message["tool_calls"].get(0) else { return Vec::new() };
    vec![message.clone(), json!({"role": "tool", "tool_call_id": call["id"], "content": "nothing"})]
}

fn after_response(answer: &Value) -> Vec<Value> {
    let output = answer["output"].as_array().unwrap();
    let Some(call) = output.iter().find(|item| item["type"] == "function_call") else { return Vec::new() };
    let result = json!({"type": "function_call_output", "call_id": call["call_id"], "output": "nothing"});
    output.iter().cloned().chain([result]).collect()
}

fn after_message(answer: &Value) -> Vec<Value> {
    let content = answer["content"].as_array().unwrap();
    let Some(call) = content.iter().find(|block| block["type"] == "tool_use") else { return Vec::new() };
    let result = json!({"type": "tool_result", "tool_use_id": call["id"], "content": "nothing"});
    vec![json!({"role": "assistant", "content": content}), json!({"role": "user", "content": [result]})]
}

#[actix_web::test]
async fn tool_loops_stay_where_they_are_in_every_api() {
    let world = World::start(&[]).await;
    let chat = json!({"model": MODEL, "tools": [{"type": "function", "function": {"name": "look"}}],
        "messages": [{"role": "user", "content": task("chat")}]});
    tool_loop(&world, "/v1/chat/completions", chat, "messages", after_chat).await;
    let responses = json!({"model": MODEL, "tools": [{"type": "function", "name": "look"}],
        "input": [{"role": "user", "content": task("responses")}]});
    let last = tool_loop(&world, "/v1/responses", responses, "input", after_response).await;
    let messages = json!({"model": MODEL, "max_tokens": 500, "tools": [{"name": "look", "input_schema": {}}],
        "messages": [{"role": "user", "content": task("messages")}]});
    let counted = post(&world, "/v1/messages/count_tokens", &messages).await;
    assert!(counted.2["input_tokens"].as_u64() > Some(1000) && !counted.1.contains_key("x-kvc-session"));
    tool_loop(&world, "/v1/messages?beta=true", messages, "messages", after_message).await;

    // State is asked of its owner only: nobody's here, and the builtin worker keeps none of its own.
    for id in ["resp_unknown", last["id"].as_str().unwrap()] {
        let body = json!({"model": MODEL, "input": "go on", "previous_response_id": id});
        let (status, _, answer) = post(&world, "/v1/responses", &body).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{id}");
        assert!(
            answer["error"]["message"].as_str().unwrap().contains("send the whole conversation"),
            "{answer}"
        );
    }
    world.assert_clean().await;
}
