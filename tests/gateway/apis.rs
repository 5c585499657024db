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

    continue_by_id(&world, &last).await;
    world.assert_clean().await;
}

/// State is asked of its owner, whatever else the request says about its session; nobody's is refused.
async fn continue_by_id(world: &World, last: &Value) {
    let ask = async |id: &Value, key: &str, header: &str| {
        let tools = json!([{"type": "function", "name": "look"}]);
        let body = json!({"model": MODEL, "input": "go on", "previous_response_id": id, "tools": tools});
        let request = Request::post(format!("{}/v1/responses", world.url));
        let request = request.header("authorization", key).header("x-session-id", header);
        let (status, headers, body) = send(request, body.to_string().into()).await;
        (status, headers, serde_json::from_slice::<Value>(&body).unwrap())
    };
    let mut id = last["id"].clone();
    let mut before = last["usage"]["total_tokens"].as_u64().unwrap();
    for header in ["another", "and another"] {
        let (status, headers, answer) = ask(&id, "", header).await;
        assert_eq!((status, mode(&headers)), (StatusCode::OK, "direct"), "{answer}");
        assert_eq!(answer["previous_response_id"], id);
        let usage = &answer["usage"];
        // It has the whole conversation before it, most of it from its KV.
        assert!(usage["input_tokens"].as_u64().unwrap() > before, "{usage}");
        assert!(usage["input_tokens_details"]["cached_tokens"].as_u64().unwrap() * 2 > before, "{usage}");
        (id, before) = (answer["id"].clone(), usage["total_tokens"].as_u64().unwrap());
    }
    // Unknown, or another tenant's.
    for (id, key) in [(json!("resp_unknown"), ""), (id, "Bearer other")] {
        let (status, _, answer) = ask(&id, key, "x").await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{answer}");
        assert_eq!(answer["error"]["param"], "previous_response_id");
        assert!(
            answer["error"]["message"].as_str().unwrap().contains("send the whole conversation"),
            "{answer}"
        );
    }
}

/// Workers that speak chat only serve the other APIs as well, at the same place from the second turn on.
#[actix_web::test]
async fn tool_loops_stay_where_they_are_when_they_are_translated() {
    let world = World::start(&[("fleet.apis", "chat")]).await;
    let responses = json!({"model": MODEL, "tools": [{"type": "function", "name": "look"}], "instructions": "Be brief.",
        "input": [{"role": "user", "content": task("responses")}]});
    let last = tool_loop(&world, "/v1/responses", responses, "input", after_response).await;
    assert_eq!((&last["object"], &last["status"]), (&json!("response"), &json!("completed")));
    assert_eq!(last["output"][0]["content"][0]["text"], "Done.");
    // What agents offer and chat has not is left out, and said.
    let offered = json!({"model": MODEL, "input": "x", "tools": [{"type": "function", "name": "look"}, {"type": "web_search"}]});
    let (status, headers, _) = post(&world, "/v1/responses", &offered).await;
    assert_eq!((status, headers["x-kvc-dropped-tools"].to_str().unwrap()), (StatusCode::OK, "web_search"));
    let held = last["usage"]["input_tokens_details"]["cached_tokens"].as_u64().unwrap();
    assert!(last["usage"]["input_tokens"].as_u64().unwrap() - held < 200, "{}", last["usage"]);
    let mut messages = json!({"model": MODEL, "max_tokens": 500, "tools": [{"name": "look", "input_schema": {}}],
        "system": [{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}, {"type": "text", "text": "Be brief."}],
        "messages": [{"role": "user", "content": task("messages")}]});
    let counted = post(&world, "/v1/messages/count_tokens", &messages).await;
    assert!(counted.2["input_tokens"].as_u64() > Some(1000) && !counted.1.contains_key("x-kvc-session"));
    let last = tool_loop(&world, "/v1/messages?beta=true", messages.clone(), "messages", after_message).await;
    assert_eq!((&last["type"], &last["stop_reason"]), (&json!("message"), &json!("end_turn")));
    assert!(last["usage"]["cache_read_input_tokens"].as_u64().unwrap() > 1000);

    // A stream has the API's events; errors are the API's too, the workers' own included.
    messages["stream"] = true.into();
    let (status, headers, body) =
        send(Request::post(format!("{}/v1/messages", world.url)), messages.to_string().into()).await;
    let text = String::from_utf8(body.to_vec()).unwrap();
    assert_eq!((status, headers["content-type"].to_str().unwrap()), (StatusCode::OK, "text/event-stream"));
    assert!(
        text.starts_with("event: message_start\n") && text.contains("\"stop_reason\":\"tool_use\""),
        "{text}"
    );
    assert!(text.ends_with("event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n"), "{text}");
    messages["temperature"] = json!(7);
    let refused = post(&world, "/v1/messages", &messages).await;
    assert_eq!((refused.0, &refused.2["type"]), (StatusCode::BAD_REQUEST, &json!("error")));
    assert!(refused.2["error"]["message"].as_str().unwrap().contains("`temperature`"), "{}", refused.2);
    let tool = json!([{"type": "web_search_20250305", "name": "web_search"}]);
    messages["tools"] = tool;
    let refused = post(&world, "/v1/messages", &messages).await;
    assert_eq!(refused.0, StatusCode::BAD_REQUEST);
    assert!(refused.2["error"]["message"].as_str().unwrap().contains("`tools[0].type`"), "{}", refused.2);
    let stateful = json!({"model": MODEL, "input": "x", "previous_response_id": "resp_1"});
    let refused = post(&world, "/v1/responses", &stateful).await;
    assert_eq!(
        (refused.0, &refused.2["error"]["param"]),
        (StatusCode::BAD_REQUEST, &json!("previous_response_id"))
    );
    world.assert_clean().await;
}
