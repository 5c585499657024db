use super::*;

/// A body of Claude Code's shape, after one turn.
fn agent() -> Value {
    json!({"model": "m", "max_tokens": 32000, "temperature": 1, "stream": true, "metadata": {"user_id": "user_1"},
        "thinking": {"type": "enabled", "budget_tokens": 31999}, "stop_sequences": ["END"],
        "system": [{"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1;"},
            {"type": "text", "text": "You are brief.", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "Now."}],
        "tools": [{"name": "ls", "description": "List.", "input_schema": {"type": "object", "properties": {"id": {}}}, "cache_control": {}},
            {"type": "custom", "name": "cat", "input_schema": {}}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": true},
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "<reminder>"}, {"type": "text", "text": "look"},
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBO"}}]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "I must look.", "signature": "sig"},
                {"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "Let me see – ✓"},
                {"type": "tool_use", "id": "call_a1b2c3d4", "name": "ls", "input": {"path": "a b"}},
                {"type": "tool_use", "id": "call_e5f6a7b8", "name": "cat", "input": {"n": 1}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "call_a1b2c3d4", "content": "a\nb"},
                {"type": "tool_result", "tool_use_id": "call_e5f6a7b8", "is_error": true, "content": [{"type": "text", "text": "no"},
                    {"type": "image", "source": {"type": "url", "url": "http://x/i.png"}}]},
                {"type": "text", "text": "go on"}]}],
        "top_k": 40, "seed": 7})
}

#[test]
fn everything_an_agent_sends_has_its_words_in_chat() {
    let chat = chat(Api::Messages, &agent());
    let function = |name: &str, more: Value| {
        let mut function = json!({"name": name});
        function.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        json!({"type": "function", "function": function})
    };
    let call = |id: &str, name: &str, arguments: &str| json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
    let expected = json!({"model": "m", "max_tokens": 32000, "temperature": 1, "stream": true,
        "stream_options": {"include_usage": true}, "user": "user_1", "reasoning_effort": "high", "stop": ["END"],
        "tool_choice": "required", "parallel_tool_calls": false, "top_k": 40, "seed": 7,
        "tools": [function("ls", json!({"description": "List.", "parameters": {"type": "object", "properties": {"id": {}}}})),
            function("cat", json!({"parameters": {}}))],
        "messages": [
            {"role": "system", "content": "You are brief.\nNow."},
            {"role": "user", "content": [{"type": "text", "text": "<reminder>"}, {"type": "text", "text": "look"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBO"}}]},
            {"role": "assistant", "reasoning_content": "I must look.", "content": "Let me see – ✓", "tool_calls": [
                call("call_a1b2c3d4", "ls", "{\"path\":\"a b\"}"), call("call_e5f6a7b8", "cat", "{\"n\":1}")]},
            {"role": "tool", "tool_call_id": "call_a1b2c3d4", "content": "a\nb"},
            {"role": "tool", "tool_call_id": "call_e5f6a7b8", "content": "no"},
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/i.png"}},
                {"type": "text", "text": "go on"}]}]});
    assert_eq!(chat, expected);
}

#[test]
fn a_stream_has_its_events_in_order() {
    let stream = streamed(Api::Messages, &agent(), &thinking_and_calls());
    let told: Vec<String> = events(&stream)
        .into_iter()
        .map(|(name, data)| match name.as_str() {
            "content_block_start" => {
                format!("start {} {}", data["index"], data["content_block"]["type"].as_str().unwrap())
            }
            "content_block_delta" => {
                let delta = data["delta"].as_object().unwrap();
                let text = delta.iter().find(|(key, _)| *key != "type").unwrap().1;
                format!("{} {} {text}", delta["type"].as_str().unwrap(), data["index"])
            }
            "content_block_stop" => format!("stop {}", data["index"]),
            _ => name,
        })
        .collect();
    let expected = [
        "message_start",
        "start 0 thinking",
        "thinking_delta 0 \"I must \"",
        "thinking_delta 0 \"look.\"",
        "signature_delta 0 \"unsigned\"",
        "stop 0",
        "start 1 text",
        "text_delta 1 \"Let me \"",
        "text_delta 1 \"see – ✓\"",
        "stop 1",
        "start 2 tool_use",
        "input_json_delta 2 \"{\\\"path\\\"\"",
        "input_json_delta 2 \": \\\"a b\\\"}\"",
        "stop 2",
        "start 3 tool_use",
        "input_json_delta 3 \"{\\\"n\\\":1}\"",
        "stop 3",
        "message_delta",
        "message_stop",
    ];
    assert_eq!(told, expected);
    let all = events(&stream);
    let message = &all[0].1["message"];
    assert_eq!(
        (&message["id"], &message["role"], &message["content"]),
        (&json!("msg_7"), &json!("assistant"), &json!([]))
    );
    let end = &all[all.len() - 2].1;
    assert_eq!(end["delta"], json!({"stop_reason": "tool_use", "stop_sequence": null}));
    let usage = json!({"input_tokens": 4, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 96, "output_tokens": 9});
    assert_eq!(end["usage"], usage);
}

#[test]
fn one_piece_says_the_same() {
    let mut body = agent();
    body["stream"] = false.into();
    assert_eq!(chat(Api::Messages, &body).get("stream_options"), None);
    let message = whole(Api::Messages, &body, &completion());
    let expected = json!([{"type": "thinking", "thinking": "I must look.", "signature": "unsigned"},
        {"type": "text", "text": "Let me see – ✓"},
        {"type": "tool_use", "id": "call_a1b2c3d4", "name": "ls", "input": {"path": "a b"}},
        {"type": "tool_use", "id": "call_e5f6a7b8", "name": "cat", "input": {"n": 1}}]);
    assert_eq!(message["content"], expected);
    assert_eq!((&message["type"], &message["stop_reason"]), (&json!("message"), &json!("tool_use")));
    assert_eq!(message["usage"]["cache_read_input_tokens"], 96);
    // Who didn't ask for thinking is not shown any.
    for thinking in
        [json!({"type": "disabled"}), Value::Null, json!({"type": "adaptive", "display": "omitted"})]
    {
        body["thinking"] = thinking;
        assert_eq!(whole(Api::Messages, &body, &completion())["content"][0]["type"], "text");
    }
    body["stream"] = true.into();
    let told = events(&streamed(Api::Messages, &body, &thinking_and_calls()));
    assert_eq!((&told[1].1["index"], &told[1].1["content_block"]["type"]), (&json!(0), &json!("text")));
}

#[test]
fn reasons_to_stop() {
    let body = json!({"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]});
    let stop = |choice: Value| {
        let mut completion = json!({"choices": [{"index": 0, "message": {"content": "y"}}]});
        completion["choices"][0].as_object_mut().unwrap().extend(choice.as_object().unwrap().clone());
        let message = whole(Api::Messages, &body, &completion);
        (message["stop_reason"].clone(), message["stop_sequence"].clone())
    };
    let plain = |reason: &str| (json!(reason), Value::Null);
    assert_eq!(stop(json!({"finish_reason": "stop"})), plain("end_turn"));
    assert_eq!(stop(json!({"finish_reason": "stop", "stop_reason": 151_645})), plain("end_turn"));
    assert_eq!(
        stop(json!({"finish_reason": "stop", "stop_reason": "END"})),
        (json!("stop_sequence"), json!("END"))
    );
    assert_eq!(
        stop(json!({"finish_reason": "stop", "matched_stop": "END"})),
        (json!("stop_sequence"), json!("END"))
    );
    assert_eq!(stop(json!({"finish_reason": "length"})), plain("max_tokens"));
    assert_eq!(stop(json!({"finish_reason": "content_filter"})), plain("refusal"));
}

#[test]
fn a_conversation_that_grows_here_grows_in_chat() {
    let all = agent();
    let bodies: Vec<Value> = [1, 3]
        .map(|count| {
            let mut body = all.clone();
            body["system"][0]["text"] = format!("x-anthropic-billing-header: cch={count};").into();
            body["messages"].as_array_mut().unwrap().truncate(count);
            body
        })
        .into();
    grows(Api::Messages, &bodies);
}

#[test]
fn what_an_engine_answers_is_what_its_echo_becomes() {
    let echo = whole(
        Api::Messages,
        &agent()
            .as_object()
            .map(|body| {
                let mut body = body.clone();
                body.insert("stream".into(), false.into());
                Value::Object(body)
            })
            .unwrap(),
        &completion(),
    );
    let mut body = agent();
    let messages = body["messages"].as_array_mut().unwrap();
    messages.truncate(1);
    messages.push(json!({"role": "assistant", "content": echo["content"]}));
    let chat = chat(Api::Messages, &body);
    let said = completion()["choices"][0]["message"].to_string();
    let render =
        |message: &Value| crate::prompt::render_assistant(Api::Chat, message.to_string().as_bytes()).unwrap();
    assert_eq!(
        render(&chat["messages"][2]),
        crate::prompt::render_assistant(Api::Chat, said.as_bytes()).unwrap()
    );
}

#[test]
fn an_engines_error_is_told_in_this_apis_words() {
    let openai = br#"{"error":{"message":"too long","type":"BadRequestError","param":null,"code":400}}"#;
    let told = |status, body: &[u8]| -> Value {
        serde_json::from_slice(&error(Api::Messages, status, body).unwrap()).unwrap()
    };
    let expected =
        json!({"type": "error", "error": {"type": "invalid_request_error", "message": "too long"}});
    assert_eq!(told(400, openai), expected);
    assert_eq!(told(500, b"oops")["error"], json!({"type": "api_error", "message": "oops"}));
    assert_eq!(told(422, br#"{"detail":"bad"}"#)["error"]["message"], "bad");
    assert_eq!(error(Api::Responses, 400, openai), None);
    let broken = streamed(
        Api::Messages,
        &agent(),
        &[delta(json!({"content": "a"})), json!({"error": {"message": "OOM"}})],
    );
    let last = events(&broken).pop().unwrap();
    assert_eq!(last.1, json!({"type": "error", "error": {"type": "api_error", "message": "OOM"}}));
}
