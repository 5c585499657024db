use super::reading::IDS_MAX;
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

fn split(observer: fn(Api) -> Observer, text: &str, step: usize) -> Observed {
    let mut observer = observer(Api::Chat);
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
        conversation: None,
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
    let mut observer = Observer::json(Api::Chat);
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

fn split_as(api: Api, text: &str, step: usize) -> Observed {
    let mut observer = if text.starts_with('{') { Observer::json(api) } else { Observer::sse(api) };
    for piece in text.as_bytes().chunks(step) {
        observer.feed(piece);
    }
    observer.into_seen()
}

#[test]
fn responses_are_read_streamed_and_whole() {
    let stream = concat!(
        "event: response.created\ndata: {\"type\":\"response.created\",\"sequence_number\":0,\"response\":{\"id\":\"resp_1\",\"status\":\"in_progress\",\"error\":null,\"output\":[],\"usage\":null}}\n\n",
        "event: response.output_item.added\ndata: {\"type\":\"response.output_item.added\",\"sequence_number\":1,\"item\":{\"type\":\"function_call\",\"id\":\"fc_1\",\"call_id\":\"call_x1\",\"status\":\"completed\"}}\n\n",
        "data: {\"type\":\"response.completed\",\"sequence_number\":2,\"response\":{\"id\":\"resp_1\",\"status\":\"completed\",\"error\":null,\"output\":[{\"type\":\"message\",\"id\":\"msg_1\",\"content\":[{\"type\":\"output_text\",\"text\":\"response.failed\"}]},{\"type\":\"function_call\",\"call_id\":\"call_x1\"},{\"type\":\"function_call\",\"call_id\":\"call_x2\"}],\"usage\":{\"input_tokens\":120,\"input_tokens_details\":{\"cached_tokens\":96},\"output_tokens\":7,\"output_tokens_details\":{\"reasoning_tokens\":3},\"total_tokens\":127}}}\n\n",
    );
    let whole = r#"{"id":"resp_1","object":"response","status":"completed","error":null,"output":[{"type":"function_call","id":"fc_1","call_id":"call_x1","arguments":"{}"},{"type":"function_call","call_id":"call_x2"}],"usage":{"input_tokens":120,"input_tokens_details":{"cached_tokens":96},"output_tokens":7}}"#;
    let expected = Observed {
        response_id: Some("resp_1".into()),
        tool_calls: vec!["call_x1".into(), "call_x2".into()],
        ..expected()
    };
    for step in [1, 3, 50, 5000] {
        assert_eq!(split_as(Api::Responses, stream, step), expected);
        assert_eq!(split_as(Api::Responses, whole, step), expected);
    }
    let cut = &stream[..stream.rfind("data:").unwrap()];
    assert!(!split_as(Api::Responses, cut, 9).complete);
    let failed = r#"{"type":"response.failed","sequence_number":4,"response":{"error":{"code":"x"}}}"#;
    let mut observer = Observer::sse(Api::Responses);
    observer.feed(format!("data: {failed}\n\n").as_bytes());
    assert_eq!((observer.next_event(), observer.seen().error), (5, true));
    let kept = r#"{"id":"resp_1","conversation":{"id":"conv_1"},"status":"completed"}"#;
    let event = format!("data: {{\"type\":\"response.completed\",\"response\":{kept}}}\n\n");
    for text in [kept, &event] {
        assert_eq!(split_as(Api::Responses, text, 5).conversation.as_deref(), Some("conv_1"));
        assert_eq!(split_as(Api::Chat, text, 5).conversation, None);
    }
    let limit = "data: {\"type\":\"response.incomplete\",\"response\":{\"status\":\"incomplete\"}}\n\n";
    let seen = split_as(Api::Responses, limit, 9);
    assert_eq!((seen.complete, seen.stop), (true, StopKind::Unknown));
}

#[test]
fn messages_are_read_streamed_and_whole() {
    let stream = concat!(
        "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"id\":\"msg_1\",\"type\":\"message\",\"content\":[],\"stop_reason\":null,\"usage\":{\"input_tokens\":20,\"cache_creation_input_tokens\":4,\"cache_read_input_tokens\":96,\"output_tokens\":1}}}\n\n",
        "event: ping\ndata: {\"type\":\"ping\"}\n\n",
        "event: content_block_start\ndata: {\"type\":\"content_block_start\",\"index\":0,\"content_block\":{\"type\":\"tool_use\",\"id\":\"toolu_1\",\"name\":\"f\",\"input\":{}}}\n\n",
        "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"index\":0,\"delta\":{\"type\":\"input_json_delta\",\"partial_json\":\"{\\\"id\\\":1}\"}}\n\n",
        "event: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"tool_use\"},\"usage\":{\"input_tokens\":0,\"output_tokens\":7}}\n\n",
    );
    let stop = "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n";
    let whole = r#"{"id":"msg_1","type":"message","content":[{"type":"text","text":"a"},{"type":"tool_use","id":"toolu_1","input":{"id":"no"}}],"stop_reason":"tool_use","usage":{"input_tokens":20,"cache_creation_input_tokens":4,"cache_read_input_tokens":96,"output_tokens":7}}"#;
    let expected =
        Observed { response_id: Some("msg_1".into()), tool_calls: vec!["toolu_1".into()], ..expected() };
    for step in [1, 3, 50, 5000] {
        assert!(!split_as(Api::Messages, stream, step).complete);
        assert_eq!(split_as(Api::Messages, &format!("{stream}{stop}"), step), expected);
        assert_eq!(split_as(Api::Messages, whole, step), expected);
    }
    let error = "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\"}}\n\n";
    assert!(split_as(Api::Messages, error, 5).error);
}

proptest::proptest! {
    #[test]
    fn any_bytes_do_no_harm(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..300), step in 1usize..40) {
        for (new, api) in [(Observer::json as fn(Api) -> Observer, Api::Chat), (Observer::sse, Api::Responses), (Observer::sse, Api::Messages)] {
            let (mut whole, mut pieces) = (new(api), new(api));
            whole.feed(&bytes);
            bytes.chunks(step).for_each(|piece| pieces.feed(piece));
            proptest::prop_assert_eq!(whole.into_seen(), pieces.into_seen());
        }
    }
}
