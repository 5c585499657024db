use super::*;

/// A body of Codex's shape, after one turn.
fn agent() -> Value {
    json!({"model": "m", "instructions": "You are Codex.", "stream": true, "store": false, "parallel_tool_calls": true,
        "include": ["reasoning.encrypted_content"], "prompt_cache_key": "k", "client_metadata": {"thread_id": "t"},
        "reasoning": {"effort": "medium", "summary": "auto"}, "text": {"verbosity": "low"}, "tool_choice": "auto",
        "max_output_tokens": 1000,
        "tools": [{"type": "function", "name": "ls", "description": "List.", "strict": false, "parameters": {"type": "object"}},
            {"type": "custom", "name": "apply_patch", "description": "Edits.", "format": {"type": "grammar", "syntax": "lark", "definition": "start: x"}}],
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandboxed."}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "look"},
                {"type": "input_image", "image_url": "data:image/png;base64,iVBO", "detail": "low"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "I must look."}], "encrypted_content": null},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see – ✓"}]},
            {"type": "function_call", "id": "fc_1", "call_id": "call_a1b2c3d4", "name": "ls", "arguments": "{\"path\": \"a b\"}"},
            {"type": "custom_tool_call", "call_id": "call_e5f6a7b8", "name": "apply_patch", "input": "*** Begin"},
            {"type": "function_call_output", "call_id": "call_a1b2c3d4", "output": "a\nb"},
            {"type": "custom_tool_call_output", "call_id": "call_e5f6a7b8", "output": [{"type": "input_text", "text": "ok"},
                {"type": "input_image", "image_url": "http://x/i.png"}]},
            {"role": "user", "content": "go on"}]})
}

#[test]
fn everything_an_agent_sends_has_its_words_in_chat() {
    let chat = chat(Api::Responses, &agent());
    let call = |id: &str, name: &str, arguments: &str| json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
    assert_eq!(
        chat["messages"],
        json!([
            {"role": "system", "content": "You are Codex.\nSandboxed."},
            {"role": "user", "content": [{"type": "text", "text": "look"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBO", "detail": "low"}}]},
            {"role": "assistant", "reasoning_content": "I must look.", "content": "Let me see – ✓", "tool_calls": [
                call("call_a1b2c3d4", "ls", "{\"path\": \"a b\"}"), call("call_e5f6a7b8", "apply_patch", "{\"input\":\"*** Begin\"}")]},
            {"role": "tool", "tool_call_id": "call_a1b2c3d4", "content": "a\nb"},
            {"role": "tool", "tool_call_id": "call_e5f6a7b8", "content": "ok"},
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/i.png"}}]},
            {"role": "user", "content": "go on"}])
    );
    assert_eq!(
        chat["tools"][0]["function"],
        json!({"name": "ls", "description": "List.", "strict": false, "parameters": {"type": "object"}})
    );
    let patch = &chat["tools"][1]["function"];
    assert_eq!(patch["parameters"]["required"], json!(["input"]));
    assert!(patch["description"].as_str().unwrap().ends_with("lark grammar:\nstart: x"));
    let mut rest = chat.clone();
    for done in ["messages", "tools"] {
        rest.as_object_mut().unwrap().remove(done);
    }
    let expected = json!({"model": "m", "stream": true, "stream_options": {"include_usage": true}, "max_tokens": 1000,
        "parallel_tool_calls": true, "reasoning_effort": "medium", "verbosity": "low", "tool_choice": "auto"});
    assert_eq!(rest, expected);
    let schema = json!({"model": "m", "input": "x", "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": true}}});
    assert_eq!(
        self::chat(Api::Responses, &schema)["response_format"],
        json!({"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": true}})
    );
}

/// Agents offer it with every request; only who asks for nothing else, or for it by name, is refused.
#[test]
fn web_search_among_other_tools_is_left_out() {
    let mut body = json!({"model": "m", "input": "x", "tool_choice": "auto", "tools": [
        {"type": "web_search", "external_web_access": false},
        {"type": "function", "name": "ls"}, {"type": "web_search_preview_2025_03_11"}]});
    let translated = request(Api::Responses, body.to_string().as_bytes()).unwrap().unwrap();
    assert_eq!(translated.dropped, ["web_search", "web_search_preview_2025_03_11"]);
    let chat = chat(Api::Responses, &body);
    assert_eq!(chat["tools"], json!([{"type": "function", "function": {"name": "ls"}}]));
    body["tool_choice"] = json!({"type": "web_search"});
    let bad = request(Api::Responses, body.to_string().as_bytes()).unwrap_err();
    assert_eq!(bad.param.as_deref(), Some("tool_choice.type"));
}

/// Codex offers its tools for sub-agents and those of MCP servers in namespaces.
#[test]
fn a_namespace_is_functions_and_back() {
    let call = json!({"type": "function_call", "call_id": "call_1", "namespace": "team", "name": "spawn", "arguments": "{}"});
    let body = json!({"model": "m", "tools": [{"type": "namespace", "name": "team", "description": "A team.",
            "tools": [{"type": "function", "name": "spawn", "description": "One more."}]}],
        "input": [{"role": "user", "content": "x"}, call, {"type": "function_call_output", "call_id": "call_1", "output": "y"}]});
    let chat = chat(Api::Responses, &body);
    assert_eq!(
        chat["tools"],
        json!([{"type": "function", "function": {"name": "team__spawn", "description": "A team.\n\nOne more."}}])
    );
    assert_eq!(chat["messages"][1]["tool_calls"][0]["function"]["name"], "team__spawn");
    let completion = json!({"id": "chatcmpl-7", "created": 5, "model": "m", "choices": [{"index": 0, "finish_reason": "tool_calls",
        "message": {"role": "assistant", "content": null, "tool_calls": [
            {"id": "call_2", "type": "function", "function": {"name": "team__spawn", "arguments": "{}"}}]}}]});
    let item = &whole(Api::Responses, &body, &completion)["output"][0];
    assert_eq!((&item["name"], &item["namespace"]), (&json!("spawn"), &json!("team")));
    let mut twice = body.clone();
    twice["tools"].as_array_mut().unwrap().insert(0, json!({"type": "function", "name": "team__spawn"}));
    let bad = request(Api::Responses, twice.to_string().as_bytes()).unwrap_err();
    assert_eq!(bad.param.as_deref(), Some("tools[1].tools[0].name"));
}

#[test]
fn a_stream_has_its_events_in_order() {
    let told = events(&streamed(Api::Responses, &agent(), &thinking_and_calls()));
    let names: Vec<&str> = told.iter().map(|(name, _)| name.strip_prefix("response.").unwrap()).collect();
    let expected = [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ];
    assert_eq!(names, expected);
    for (number, (_, data)) in told.iter().enumerate() {
        assert_eq!(data["sequence_number"], number);
    }
    let response = &told.last().unwrap().1["response"];
    let done: Vec<&Value> = told
        .iter()
        .filter(|(name, _)| name == "response.output_item.done")
        .map(|(_, data)| &data["item"])
        .collect();
    assert_eq!(response["output"].as_array().unwrap().iter().collect::<Vec<_>>(), done);
    for (name, data) in &told {
        if let Some(index) = data["output_index"].as_u64() {
            let id = if data["item"].is_null() { &data["item_id"] } else { &data["item"]["id"] };
            assert_eq!(*id, response["output"][index as usize]["id"], "{name}");
        }
    }
    assert_eq!(
        (&response["status"], &response["id"], &response["store"]),
        (&json!("completed"), &json!("resp_7"), &json!(false))
    );
    let usage = json!({"input_tokens": 100, "input_tokens_details": {"cached_tokens": 96}, "output_tokens": 9,
        "output_tokens_details": {"reasoning_tokens": 4}, "total_tokens": 109});
    assert_eq!(response["usage"], usage);
    assert_eq!(
        (&response["instructions"], &response["tools"]),
        (&agent()["instructions"], &agent()["tools"])
    );
}

#[test]
fn one_piece_says_the_same() {
    let mut body = agent();
    body["stream"] = false.into();
    let response = whole(Api::Responses, &body, &completion());
    let told = events(&streamed(Api::Responses, &agent(), &thinking_and_calls()));
    let mut streamed = told.last().unwrap().1["response"].clone();
    assert_eq!(response["output"][2]["arguments"], "{\"path\": \"a b\"}");
    for index in 0..4 {
        assert_eq!(response["output"][index], streamed["output"][index]);
    }
    streamed["output"] = response["output"].clone();
    assert_eq!(response, streamed);
}

#[test]
fn a_free_input_comes_out_of_its_wrapping() {
    let call = json!({"index": 0, "id": "call_e5f6a7b8", "function": {"name": "apply_patch", "arguments": "{\"input\": \"*** Be"}});
    let rest = json!({"index": 0, "function": {"arguments": "gin\\n\"}"}});
    let chunks = [
        delta(json!({"tool_calls": [call]})),
        delta(json!({"tool_calls": [rest]})),
        finish("tool_calls"),
        json!("DONE"),
    ];
    let told = events(&streamed(Api::Responses, &agent(), &chunks));
    let of = |name: &str| {
        told.iter().find(|(n, _)| n == &format!("response.{name}")).map(|(_, data)| data.clone()).unwrap()
    };
    assert_eq!(of("custom_tool_call_input.delta")["delta"], "*** Begin\n");
    assert_eq!(of("custom_tool_call_input.done")["input"], "*** Begin\n");
    let item = &of("output_item.done")["item"];
    assert_eq!((&item["type"], &item["input"]), (&json!("custom_tool_call"), &json!("*** Begin\n")));
    assert!(told.iter().all(|(name, _)| !name.contains("function_call")));
}

#[test]
fn how_a_response_ends() {
    let body = json!({"model": "m", "input": "x", "stream": true});
    let last = |chunks: &[Value]| events(&streamed(Api::Responses, &body, chunks)).pop().unwrap();
    let (name, data) = last(&[delta(json!({"content": "a"})), finish("length"), json!("DONE")]);
    assert_eq!(name, "response.incomplete");
    assert_eq!(data["response"]["incomplete_details"], json!({"reason": "max_output_tokens"}));
    assert_eq!(data["response"]["output"][0]["status"], "incomplete");
    let (name, data) =
        last(&[delta(json!({"content": "a"})), json!({"error": {"message": "OOM", "code": 500}})]);
    assert_eq!((name.as_str(), &data["response"]["error"]["message"]), ("response.failed", &json!("OOM")));
    let (name, data) = last(&[finish("stop"), json!("DONE")]);
    assert_eq!((name.as_str(), &data["response"]["output"]), ("response.completed", &json!([])));
}

#[test]
fn a_conversation_that_grows_here_grows_in_chat() {
    let all = agent();
    let bodies: Vec<Value> = [2, 8, 9]
        .map(|count| {
            let mut body = all.clone();
            body["input"].as_array_mut().unwrap().truncate(count);
            body
        })
        .into();
    grows(Api::Responses, &bodies);
}

#[test]
fn what_an_engine_answers_is_what_its_echo_becomes() {
    let mut body = agent();
    body["stream"] = false.into();
    let echo = whole(Api::Responses, &body, &completion())["output"].clone();
    let input = body["input"].as_array_mut().unwrap();
    input.truncate(2);
    input.extend(echo.as_array().unwrap().clone());
    let chat = chat(Api::Responses, &body);
    assert_eq!(chat["messages"].as_array().unwrap().len(), 3);
    let said = completion()["choices"][0]["message"].to_string();
    let render = |message: &str| crate::prompt::render_assistant(Api::Chat, message.as_bytes()).unwrap();
    assert_eq!(render(&chat["messages"][2].to_string()), render(&said));
}
