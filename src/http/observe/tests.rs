use super::*;

const STREAM: &str = concat!(
    ": ping {\"id\":\"no\"}\n\n",
    "data: {\"id\":\"chatcmpl-1\",\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"finish_reason\":null}],\"usage\":null}\n\n",
    "event: x\r\ndata:{\"id\":\"chatcmpl-1\",\"choices\":[{\"delta\":{\"tool_calls\":[{\"index\":0,\"id\":\"call_a\\u0062\",\"function\":{\"name\":\"f\",\"arguments\":\"\"}}]}}]}\r\n\r\n",
    "data: {\"choices\":[{\"delta\":{\"tool_calls\":[{\"index\":0,\"function\":{\"arguments\":\"\\\"\\ndata: [DONE]\\n{\\\"usage\\\":{\\\"prompt_tokens\\\":9\"}}]}}]}\n\n",
    "data: {\"choices\":[{\"delta\":{\"tool_calls\":[{\"index\":1,\"id\":\"call_c\"}]}}]}\n\n",
);
const END: &str = concat!(
    "data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"tool_calls\"}]}\n\n",
    "data: {\"choices\":[],\"usage\":{\"prompt_tokens\": 120,\"total_tokens\":127,\"completion_tokens\":7,\"prompt_tokens_details\":{\"cached_tokens\":96}}}\n\n",
    "data: [DONE]\n\n",
);

fn split(observer: fn() -> Observer, text: &str, step: usize) -> Observed {
    let mut observer = observer();
    for piece in text.as_bytes().chunks(step) {
        observer.feed(piece);
    }
    observer.into_seen()
}

fn expected() -> Observed {
    Observed {
        prompt_tokens: Some(120),
        completion_tokens: Some(7),
        cached_tokens: Some(96),
        stop: StopKind::ToolUse,
        response_id: Some("chatcmpl-1".into()),
        tool_calls: vec!["call_ab".into(), "call_c".into()],
        complete: true,
        error: false,
    }
}

#[test]
fn a_stream_is_read_whatever_its_split_and_line_ends() {
    let lf = format!("{STREAM}{END}");
    let crlf = lf.replace("\r\n", "\n").replace('\n', "\r\n");
    let cr = lf.replace("\r\n", "\n").replace('\n', "\r");
    for text in [lf, crlf, cr] {
        for step in (1..80).chain([text.len()]) {
            assert_eq!(split(Observer::sse, &text, step), expected(), "step {step}");
        }
    }
}

#[test]
fn done_counts_only_as_a_whole_line() {
    let seen = split(Observer::sse, STREAM, 7);
    assert!(!seen.complete, "`data: [DONE]` inside arguments is no end");
    assert_eq!(seen.prompt_tokens, None, "usage inside arguments is text");
    for (text, complete) in [
        ("data: [DONE]\n", true),
        ("data:[DONE] \r\n", true),
        ("data: [DONE]", false),
        ("data: [DONE]x\n", false),
        ("data: x[DONE]\n", false),
        (" data: [DONE]\n", false),
        ("xdata: [DONE]\n", false),
        ("data : [DONE]\n", false),
    ] {
        assert_eq!(split(Observer::sse, text, 3).complete, complete, "{text:?}");
    }
}

#[test]
fn a_json_answer_is_read_in_any_order_and_split() {
    let long = "x\\\"}],\\\\".repeat(5000);
    let text = format!(
        r#"{{ "usage" : {{"prompt_tokens_details":{{"cached_tokens":96,"a":[1,{{}}]}},"prompt_tokens":120,"completion_tokens":7}},
        "prompt_logprobs":[[[[[[[[[[{{"id":"deep","usage":{{"prompt_tokens":1}}}}]]]]]]]]]], "nested":{{"id":"no","finish_reason":"stop"}},
        "choices":[{{"message":{{"content":"{long}","tool_calls":[{{"id":"call_ab"}},{{"function":{{"id":"no"}},"id":"call_c"}}]}},
        "logprobs":null,"finish_reason":"tool_calls"}}], "id":"chatcmpl-1", "error":null }}"#
    );
    for step in [1, 2, 3, 7, 64, 1000, text.len()] {
        assert_eq!(split(Observer::json, &text, step), expected(), "step {step}");
    }
}

#[test]
fn errors_in_a_stream_are_seen() {
    assert!(split(Observer::sse, "data: {\"error\":{\"message\":\"x\"}}\n\n", 4).error);
    assert!(!split(Observer::sse, "data: {\"x\":{\"error\":{}}}\n\n", 4).error);
}

#[test]
fn memory_is_bounded() {
    let mut observer = Observer::json();
    observer.feed(b"{\"id\":\"");
    for _ in 0..1000 {
        observer.feed(&[b'x'; 1000]);
    }
    observer.feed(b"\",\"choices\":[{\"message\":{\"tool_calls\":[");
    for n in 0..10_000 {
        observer.feed(format!("{{\"id\":\"call_{n}\"}},").as_bytes());
    }
    assert_eq!((observer.seen().response_id.as_ref(), observer.seen().tool_calls.len()), (None, IDS_MAX));
}

proptest::proptest! {
    #[test]
    fn any_bytes_do_no_harm(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..300), step in 1usize..40) {
        for new in [Observer::json, Observer::sse] {
            let (mut whole, mut pieces) = (new(), new());
            whole.feed(&bytes);
            bytes.chunks(step).for_each(|piece| pieces.feed(piece));
            proptest::prop_assert_eq!(whole.into_seen(), pieces.into_seen());
        }
    }
}
