use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

fn text_of(api: Api, body: &Value) -> Vec<u8> {
    canonical(api, body.to_string().as_bytes()).expect("a good body")
}

fn chat(messages: Value) -> Value {
    json!({"model": "m", "messages": messages})
}

/// A prefix store of one.
struct One(Known);

impl Prefixes for One {
    fn find(&self, _: &[u8]) -> Option<Known> {
        Some(self.0.clone())
    }
}

/// The same JSON with every character of every string as `\u` escapes.
fn escaped(value: &Value) -> String {
    let string = |s: &str| {
        let units: String = s.encode_utf16().map(|unit| format!("\\u{unit:04x}")).collect();
        format!("\"{units}\"")
    };
    match value {
        Value::String(s) => string(s),
        Value::Array(list) => format!("[ {} ]", list.iter().map(escaped).collect::<Vec<_>>().join(" ,\n")),
        Value::Object(map) => {
            // In the other order, too: the order of a message's fields means nothing.
            let members = map.iter().rev().map(|(k, v)| format!("{} : {}", string(k), escaped(v)));
            format!("{{\t{} }}", members.collect::<Vec<_>>().join(" , "))
        }
        other => other.to_string(),
    }
}

fn message() -> impl Strategy<Value = Value> {
    let text = any::<String>();
    prop_oneof![
        (prop_oneof![Just("user"), Just("system"), Just("assistant")], text)
            .prop_map(|(role, text)| json!({"role": role, "content": text})),
        (text, text).prop_map(|(a, b)| json!({"role": "user", "content": [
            {"type": "text", "text": a}, {"type": "text", "text": b}]})),
        text.prop_map(|t| json!({"role": "tool", "tool_call_id": "call_12345678", "content": t})),
        text.prop_map(|t| json!({"role": "assistant", "content": null, "reasoning_content": t,
            "tool_calls": [{"id": "call_12345678", "type": "function", "function": {"name": "f", "arguments": t}}]})),
    ]
}

proptest! {
    #[test]
    fn spelling_does_not_matter(messages in proptest::collection::vec(message(), 0..6)) {
        let body = chat(json!(messages));
        let other = canonical(Api::Chat, escaped(&body).as_bytes()).expect("a good body");
        prop_assert_eq!(text_of(Api::Chat, &body), other);
    }

    #[test]
    fn an_echoed_answer_continues_the_prompt(messages in proptest::collection::vec(message(), 0..4), answer in any::<String>()) {
        let mut bytes = text_of(Api::Chat, &chat(json!(messages)));
        bytes.extend_from_slice(assistant_header(Api::Chat));
        bytes.extend_from_slice(answer.as_bytes());
        let mut echoed = messages;
        echoed.push(json!({"role": "assistant", "content": answer}));
        prop_assert!(text_of(Api::Chat, &chat(json!(echoed))).starts_with(&bytes));
        bytes.extend_from_slice(assistant_end(Api::Chat));
        prop_assert_eq!(text_of(Api::Chat, &chat(json!(echoed))), bytes);
    }

    #[test]
    fn a_longer_prompt_shares_items_and_chain(messages in proptest::collection::vec(message(), 1..8), cut in 0usize..8) {
        let cut = cut.min(messages.len());
        let whole = chat(json!(messages)).to_string();
        let part = chat(json!(messages[..cut])).to_string();
        let whole = read(Api::Chat, whole.as_bytes(), &()).expect("good");
        let part = read(Api::Chat, part.as_bytes(), &()).expect("good");
        prop_assert_eq!(whole.layout().common(part.layout()), cut);
        prop_assert_eq!(whole.layout().common_blocks(part.layout()), part.layout().chain.len());
    }

    #[test]
    fn chain_covers_the_canonical_text(messages in proptest::collection::vec(message(), 0..5)) {
        let body = json!({"model": "m", "tools": [{"name": "t"}], "messages": messages}).to_string();
        let prompt = read(Api::Chat, body.as_bytes(), &()).expect("good");
        let bytes = canonical(Api::Chat, body.as_bytes()).expect("good");
        prop_assert_eq!(&*prompt.layout().chain, &*chain("m", &bytes));
        prop_assert_eq!(prompt.layout().bytes(), bytes.len() as u64);
    }

    /// What is read quickly is what is read slowly, whatever changed since.
    #[test]
    fn quick_reading_changes_nothing(
        messages in proptest::collection::vec(message(), 1..8),
        more in proptest::collection::vec(message(), 0..3),
        edit in 0usize..12,
        tools in any::<bool>(),
    ) {
        let filler = json!({"role": "user", "content": "x".repeat(3000)});
        let mut before = vec![filler];
        before.extend(messages);
        let mut after = before.clone();
        after.extend(more);
        if let Some(message) = after.get_mut(edit) {
            *message = json!({"role": "user", "content": "edited"});
        }
        let first = json!({"messages": before, "model": "m", "tools": [1]}).to_string();
        let second = json!({"messages": after, "model": "m", "tools": if tools { json!([1]) } else { json!([2]) }}).to_string();
        let known = read(Api::Chat, first.as_bytes(), &()).expect("good").known;
        prop_assert!(known.marks[1].is_some());
        let slow = read(Api::Chat, second.as_bytes(), &()).expect("good");
        let quick = read(Api::Chat, second.as_bytes(), &One(known)).expect("good");
        prop_assert_eq!(slow.layout(), quick.layout());
        prop_assert_eq!(slow.known.marks[1], quick.known.marks[1]);
        let last = slow.layout().items.len() - 1;
        prop_assert!(quick.item(last).is_none_or(|item| Some(item) == slow.item(last)));
    }
}

#[test]
fn a_quick_reading_skips_what_is_known() {
    let text = "x".repeat(5000);
    let body =
        |more: &str| format!(r#"{{"model":"m","messages":[{{"role":"user","content":"{text}"}}{more}]}}"#);
    let known = read(Api::Chat, body("").as_bytes(), &()).expect("good").known;
    let second = body(r#",{"role":"assistant","content":"a"},{"role":"user","content":"b"}"#);
    let quick = read(Api::Chat, second.as_bytes(), &One(known)).expect("good");
    assert_eq!(quick.layout().items.len(), 3);
    assert!(quick.text.len() < 100, "{}", quick.text.len());
}

#[test]
fn moving_cache_breakpoints_still_read_quickly() {
    let turn = |count: usize| {
        let message = |i: usize| {
            let role = if i.is_multiple_of(2) { "user" } else { "assistant" };
            let mut part = json!({"type": "text", "text": format!("{i} {}", "x".repeat(1000))});
            if i + 3 > count {
                part["cache_control"] = json!({"type": "ephemeral"});
            }
            json!({"role": role, "content": [part]})
        };
        let messages: Vec<Value> = (0..count).map(message).collect();
        json!({"messages": messages, "model": "m"}).to_string()
    };
    let mut known = read(Api::Messages, turn(9).as_bytes(), &()).expect("good").known;
    for count in [11, 13, 15, 17] {
        let body = turn(count);
        let quick = read(Api::Messages, body.as_bytes(), &One(known)).expect("good");
        assert!(quick.text.len() < 8500, "{count}: {}", quick.text.len());
        assert_eq!(quick.layout(), read(Api::Messages, body.as_bytes(), &()).expect("good").layout());
        known = quick.known;
    }
}

#[test]
fn empty_reasoning_is_none() {
    let plain = text_of(Api::Chat, &chat(json!([{"role": "assistant", "content": "a"}])));
    for empty in [json!(""), json!(null), json!([])] {
        let body = chat(json!([{"role": "assistant", "content": "a", "reasoning_content": empty}]));
        assert_eq!(text_of(Api::Chat, &body), plain);
    }
}

#[test]
fn string_and_single_part_are_one_thing() {
    let forms = [
        json!("hi"),
        json!([{"type": "text", "text": "hi"}]),
        json!([{"text": "hi", "type": "text", "cache_control": {"type": "ephemeral"}}]),
        json!([{"type": "input_text", "text": "hi"}]),
    ];
    let texts = forms.map(|content| text_of(Api::Chat, &chat(json!([{"role": "user", "content": content}]))));
    assert!(texts.iter().all(|text| *text == b"\xFEuser\nhi\xFF"), "{texts:?}");
}

#[test]
fn neutral_fields_are_left_out() {
    let responses = |id: &str, sealed: &str| {
        json!({"model": "m", "instructions": "sys", "input": [
            {"type": "message", "id": id, "status": id, "role": "user", "content": [{"type": "input_text", "text": "go"}]},
            {"type": "reasoning", "id": id, "summary": [{"type": "summary_text", "text": "hm"}], "encrypted_content": sealed},
            {"type": "function_call", "id": id, "call_id": id, "status": id, "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": id, "output": "x"},
            {"type": "custom_tool_call_output", "call_id": id, "output": "y"},
        ]})
    };
    let a = text_of(Api::Responses, &responses("a", "s1"));
    assert_eq!(a, text_of(Api::Responses, &responses("b", "s2")));
    assert_eq!(
        String::from_utf8_lossy(&a).replace('\u{FFFD}', "|"),
        "|system\nsys||user\ngo||assistant\n|hm||assistant\n|f\n{}||tool\nx|\
         |custom_tool_call_output\n{\"type\":\"custom_tool_call_output\",\"output\":\"y\"}|"
            .replace(
                "{\"type\":\"custom_tool_call_output\",\"output\":\"y\"}",
                "{\"output\":\"y\",\"type\":\"custom_tool_call_output\"}"
            )
    );
}

#[test]
fn claude_blocks() {
    let body = |cch: &str, signature: &str, mark: Value| {
        json!({"model": "m", "system": [
                {"type": "text", "text": format!("x-anthropic-billing-header: cc_version=2; cch={cch};")},
                {"type": "text", "text": "You are.", "cache_control": mark}],
            "tools": [{"name": "B", "input_schema": {"properties": {"id": {"type": "string"}}}, "cache_control": mark}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": mark}]},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "hm", "signature": signature},
                    {"type": "text", "text": "yo"},
                    {"type": "tool_use", "id": signature, "name": "B", "input": {"id": 7}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": signature, "content": [{"type": "text", "text": "out"}]}]}]})
    };
    let a = text_of(Api::Messages, &body("1", "s", json!({"type": "ephemeral"})));
    assert_eq!(a, text_of(Api::Messages, &body("2", "t", Value::Null)));
    let text = String::from_utf8_lossy(&a);
    assert!(text.contains("You are.") && text.contains("\"id\":{") && text.contains("{\"id\":7}"), "{text}");
    assert!(!text.contains("billing"), "{text}");
    // The same in one string: only the attribution's line goes.
    let string =
        json!({"model": "m", "system": "x-anthropic-billing-header: cch=1;\nYou are.", "messages": []});
    assert_eq!(text_of(Api::Messages, &string), b"\xFEsystem\nYou are.\xFF");
    // In a user's message it is text like any other.
    let user = chat(json!([{"role": "user", "content": "x-anthropic-billing-header"}]));
    assert!(text_of(Api::Chat, &user).windows(9).any(|w| w == b"anthropic"));
}

#[test]
fn images_have_a_fixed_size_and_their_own_digest() {
    let body = |data: &str| {
        chat(json!([{"role": "user", "content": [
            {"type": "text", "text": "see"},
            {"type": "image_url", "image_url": {"url": format!("data:image/png;base64,{data}")}}]}]))
    };
    let (a, b) = (text_of(Api::Chat, &body("aaaa")), text_of(Api::Chat, &body(&"b".repeat(9999))));
    assert_eq!((a.len(), a == b), (b.len(), false));
    assert!(a.len() > MEDIA_BYTES);
    let text = body("aaaa").to_string();
    let prompt = read(Api::Chat, text.as_bytes(), &()).expect("good");
    assert_eq!(prompt.layout().media(), 1);
}

#[test]
fn bare_prompts() {
    assert_eq!(text_of(Api::Completions, &json!({"model": "m", "prompt": "a\nb"})), b"a\nb");
    assert_eq!(text_of(Api::Completions, &json!({"model": "m", "prompt": ["one", "two"]})), b"one");
    assert_eq!(
        text_of(Api::Completions, &json!({"model": "m", "prompt": [1, 258]})),
        [1, 0, 0, 0, 2, 1, 0, 0]
    );
    assert_eq!(assistant_header(Api::Completions), b"");
}

#[test]
fn scripted_calls_are_known_before_their_echo() {
    let call = json!({"role": "assistant", "content": "ok", "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{\"a\":1}"}}]});
    let prompt = json!([{"role": "user", "content": "go"}]);
    let mut bytes = text_of(Api::Chat, &chat(prompt.clone()));
    bytes.extend(render_assistant(Api::Chat, call.to_string().as_bytes()).expect("good"));
    assert_eq!(bytes, text_of(Api::Chat, &chat(json!([prompt[0], call]))));
    let items = json!([
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ok"}]},
        {"type": "function_call", "name": "f", "arguments": "{}"}]);
    let rendered = render_assistant(Api::Responses, items.to_string().as_bytes()).expect("good");
    assert!(rendered.starts_with(assistant_header(Api::Responses)));
    assert_eq!(rendered, text_of(Api::Responses, &json!({"model": "m", "input": items})));
}

#[test]
fn fields() {
    let body = br#"{"model":"x","model":"m","stream":true,"stream_options":{"include_usage":true},"max_tokens":5,
        "max_completion_tokens":7,"n":2,"metadata":{"session_id":"s","user_id":7},"conversation":{"id":"conv"},
        "session_id":42,"user":null,"huge":123456789012345678901234567890,"messages":[]}"#;
    let prompt = read(Api::Chat, body, &()).expect("good");
    let f = &prompt.fields;
    assert_eq!((&*f.model, f.stream, f.include_usage, f.max_output, f.n), ("m", true, true, Some(7), 2));
    assert_eq!(f.ids.metadata_session_id.as_deref(), Some("s"));
    assert_eq!(f.ids.conversation.as_deref(), Some("conv"));
    assert_eq!((&f.ids.session_id, &f.ids.user, &f.ids.metadata_user_id), (&None, &None, &None));
    // Cursor's shape: Responses input at the chat endpoint. Duplicates: the last one counts.
    let cursor = br#"{"model":"m","input":[{"role":"user","content":"a"}],"input":"b"}"#;
    assert_eq!(canonical(Api::Chat, cursor).expect("good"), b"\xFEuser\nb\xFF");
}

#[test]
fn bad_bodies_say_what_is_wrong() {
    let param = |api, body: &str| read(api, body.as_bytes(), &()).expect_err(body).param;
    assert_eq!(param(Api::Chat, r#"{"messages":[]}"#).as_deref(), Some("model"));
    assert_eq!(param(Api::Chat, r#"{"model":7,"messages":[]}"#).as_deref(), Some("model"));
    assert_eq!(param(Api::Chat, r#"{"model":"m"}"#).as_deref(), Some("messages"));
    assert_eq!(param(Api::Chat, r#"{"model":"m","messages":"x"}"#).as_deref(), Some("messages"));
    assert_eq!(param(Api::Chat, r#"{"model":"m","messages":[1]}"#).as_deref(), Some("messages"));
    assert_eq!(
        param(Api::Chat, r#"{"model":"m","messages":[{"content":"x"}]}"#).as_deref(),
        Some("messages")
    );
    assert_eq!(param(Api::Responses, r#"{"model":"m"}"#).as_deref(), Some("input"));
    assert_eq!(param(Api::Completions, r#"{"model":"m","prompt":{}}"#).as_deref(), Some("prompt"));
    for malformed in [
        "",
        "{",
        "[]",
        "nul",
        r#"{"model":"m","messages":[{"role":"user"]}"#,
        r#"{"model":"m","messages":[]} x"#,
    ] {
        assert_eq!(param(Api::Chat, malformed), None, "{malformed}");
    }
    assert!(read(Api::Chat, b"{\"model\":\"\xFF\",\"messages\":[]}", &()).is_err());
}
