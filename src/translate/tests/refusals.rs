use super::*;

fn refused(api: Api, body: &Value) -> (String, String) {
    let bad = request(api, body.to_string().as_bytes()).unwrap_err();
    let param = bad.param.map(|param| param.into_owned()).unwrap_or_default();
    assert!(bad.message.contains(&param), "{}", bad.message);
    (param, bad.message)
}

#[test]
fn what_chat_cannot_say_is_refused_by_name() {
    let responses = |field: &str, value: Value| {
        let mut body = json!({"model": "m", "input": "x"});
        body[field] = value;
        refused(Api::Responses, &body)
    };
    let cases = [
        ("previous_response_id", json!("resp_1"), "previous_response_id"),
        ("conversation", json!("conv_1"), "conversation"),
        ("background", json!(true), "background"),
        ("truncation", json!("auto"), "truncation"),
        ("prompt", json!({"id": "p"}), "prompt"),
        ("top_logprobs", json!(3), "top_logprobs"),
        ("include", json!(["reasoning.encrypted_content", "message.output_text.logprobs"]), "include[1]"),
        ("tools", json!([{"type": "function", "name": "a"}, {"type": "file_search"}]), "tools[1].type"),
        ("tools", json!([{"type": "web_search"}]), "tools[0].type"),
        ("tools", json!([{"type": "function"}]), "tools[0].name"),
        ("text", json!({"format": {"type": "yaml"}}), "text.format.type"),
        ("input", json!([{"type": "item_reference", "id": "x"}]), "input[0].type"),
        (
            "input",
            json!([{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]),
            "input[0].content[0].image_url",
        ),
        ("input", json!([{"type": "function_call_output", "output": "x"}]), "input[0].call_id"),
        ("input", json!([{"role": "user", "content": 7}]), "input[0].content"),
        ("input", json!(7), "input"),
        ("max_output_tokens", json!("many"), "max_output_tokens"),
        ("temperature", json!("hot"), "temperature"),
        ("stream", json!(1), "stream"),
    ];
    for (field, value, param) in cases {
        assert_eq!(responses(field, value.clone()).0, param, "{field}: {value}");
    }
    let messages = |field: &str, value: Value| {
        let mut body = json!({"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]});
        body[field] = value;
        refused(Api::Messages, &body)
    };
    let block = |block: Value| json!([{"role": "user", "content": [{"type": "text", "text": "a"}, block]}]);
    let cases = [
        ("max_tokens", Value::Null, "max_tokens"),
        ("max_tokens", json!(-1), "max_tokens"),
        ("mcp_servers", json!([{"url": "x"}]), "mcp_servers"),
        ("tools", json!([{"type": "bash_20250124", "name": "bash"}]), "tools[0].type"),
        ("tools", json!([{"input_schema": {}}]), "tools[0]"),
        ("tool_choice", json!({"type": "tool"}), "tool_choice.name"),
        ("messages", json!([{"role": "robot", "content": "x"}]), "messages[0].role"),
        ("messages", block(json!({"type": "server_tool_use"})), "messages[0].content[1].type"),
        (
            "messages",
            block(json!({"type": "image", "source": {"type": "file", "file_id": "f"}})),
            "messages[0].content[1].source.type",
        ),
        (
            "messages",
            block(json!({"type": "tool_result", "content": "x"})),
            "messages[0].content[1].tool_use_id",
        ),
        ("messages", block(json!({"type": "text", "text": 7})), "messages[0].content[1].text"),
        ("system", json!(7), "system"),
        ("thinking", json!({"type": "deep"}), "thinking.type"),
        ("stop_sequences", json!("x"), "stop_sequences"),
    ];
    for (field, value, param) in cases {
        assert_eq!(messages(field, value.clone()).0, param, "{field}: {value}");
    }
}

#[test]
fn broken_bodies_are_told_as_such() {
    for body in ["", "{", "[]", "{\"model\":\"m\",\"input\":[{]}", "nul"] {
        let bad = request(Api::Responses, body.as_bytes()).unwrap_err();
        assert!(bad.param.is_none() && bad.message.starts_with("the request body"), "{body}: {bad}");
    }
    assert_eq!(refused(Api::Responses, &json!({"input": "x"})).1, "`model` is missing");
    assert_eq!(refused(Api::Messages, &json!({"model": "m", "max_tokens": 1})).1, "`messages` is missing");
}
