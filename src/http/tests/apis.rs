//! The other APIs: their paths, their errors, and what is never a turn.

use super::rig::{Event, Rig, direct};
use crate::core::types::StopKind;
use crate::engines::fake::{self, Conn};
use crate::http::errors::ApiError;

/// Bodies as no serialiser would write them: they must reach the worker as they are.
fn odd_bodies() -> Vec<String> {
    let tools: Vec<String> = (0..200).map(|n| format!("{{\"name\" : \"t{n}\"}}")).collect();
    vec![
        " {\"z\":1,\"model\":\"m\", \"a\" : {\"y\":[ ],\"b\":null}}\r\n".into(),
        "{\"x\":1,\"x\":{\"x\":2},\"x\":[1,1]}".into(),
        "{\"t\":\"\\u00e9\\ud83d\\ude00\\/\\u0000é😀\"}".into(),
        "{\"n\":[1e400,-0.0,1.10,123456789012345678901234567890,0.1e-7]}".into(),
        "{\"unknown\":{\"deep\":[[[[{\"cache_control\":{\"type\":\"ephemeral\"}}]]]]},\"metadata\":{}}"
            .into(),
        format!(
            "{{\"tools\":[{}],\"system\":[{{\"text\":\"x-anthropic-billing-header: cch=1;\"}}]}}",
            tools.join(" ,")
        ),
    ]
}

#[actix_web::test]
async fn bodies_pass_byte_for_byte_in_every_api() {
    let (tell, mut bodies) = tokio::sync::mpsc::unbounded_channel();
    let worker = fake::worker(move |mut conn: Conn| {
        let tell = tell.clone();
        async move {
            while let Some(request) = conn.request().await {
                tell.send(request).unwrap();
                conn.answer(200, "{}").await;
            }
        }
    })
    .await;
    for path in ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages?beta=true"] {
        for body in odd_bodies() {
            let rig = Rig::new(vec![direct(&worker)]);
            assert_eq!(rig.post_to(path, &body).await.status(), 200);
            let request = bodies.recv().await.unwrap();
            assert_eq!(String::from_utf8(request.body).unwrap(), body);
            assert!(request.head.starts_with(&format!("POST {path} HTTP/1.1")), "{}", request.head);
        }
    }
}

#[actix_web::test]
async fn an_engine_may_have_bodies_stripped() {
    let (tell, mut bodies) = tokio::sync::mpsc::unbounded_channel();
    let worker = fake::worker(move |mut conn: Conn| {
        let tell = tell.clone();
        async move {
            while let Some(request) = conn.request().await {
                tell.send(request.body).unwrap();
                conn.answer(200, "{}").await;
            }
        }
    })
    .await;
    let body = r#"{"system":[{"text":"x-anthropic-billing-header: cch=1;"}],"tools":[{"cache_control":{}, "n":1.0}]}"#;
    let stripping = |what: &str| {
        let flag = (!what.is_empty()).then(|| ("fleet.strip".to_owned(), what.to_owned()));
        Rig::set(flag.into_iter().collect(), vec![Ok(direct(&worker)), Ok(direct(&worker))])
    };
    let cases = [
        ("", body),
        (
            "cache_control",
            r#"{"system":[{"text":"x-anthropic-billing-header: cch=1;"}],"tools":[{ "n":1.0}]}"#,
        ),
        ("attribution,cache_control", r#"{"system":[],"tools":[{ "n":1.0}]}"#),
    ];
    for (what, expected) in cases {
        let rig = stripping(what);
        for path in ["/v1/messages", "/v1/messages/count_tokens"] {
            assert_eq!(rig.post_to(path, body).await.status(), 200);
            assert_eq!(String::from_utf8(bodies.recv().await.unwrap()).unwrap(), expected);
        }
    }
}

#[actix_web::test]
async fn errors_speak_their_api() {
    let refused = || Err(ApiError::bad_body("`model` is missing", Some("model".into())));
    let rig = Rig::with(&[], vec![refused(), refused()]);
    let openai = rig.post_to("/v1/responses", "{}").await;
    let error = &openai.json()["error"];
    assert_eq!(
        (openai.status(), error["code"].as_str(), error["param"].as_str()),
        (400, Some("invalid_request"), Some("model"))
    );
    let anthropic = rig.post_to("/v1/messages", "{}").await;
    let expected =
        r#"{"error":{"message":"`model` is missing","type":"invalid_request_error"},"type":"error"}"#;
    assert_eq!((anthropic.status(), anthropic.body.as_str()), (400, expected));
    let refused = rig.post_to("/v1/messages", "{}").await;
    assert_eq!((refused.status(), refused.header("retry-after")), (429, "7"));
    assert_eq!(refused.json()["error"]["type"], "rate_limit_error");
    assert_eq!(rig.get("/v1/messages").await.json()["type"], "error");
}

#[actix_web::test]
async fn a_death_in_mid_stream_is_told_in_the_apis_events() {
    const HEAD: &str =
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
    let begun = "event: x\ndata: {\"type\":\"x\",\"sequence_number\":6}\n\n";
    let worker = fake::worker(move |mut conn: Conn| async move {
        conn.request().await;
        conn.send(format!("{HEAD}{:x}\r\n{begun}\r\n0\r\n\r\n", begun.len())).await;
    })
    .await;
    let events = [
        (
            "/v1/responses",
            "event: error\ndata: {\"code\":\"worker_died\",\"message\":\"The worker failed in the middle of its answer.\",\"param\":null,\"sequence_number\":7,\"type\":\"error\"}\n\n",
        ),
        (
            "/v1/messages",
            "event: error\ndata: {\"error\":{\"message\":\"The worker failed in the middle of its answer.\",\"type\":\"api_error\"},\"type\":\"error\"}\n\n",
        ),
    ];
    for (path, event) in events {
        let mut rig = Rig::new(vec![direct(&worker)]);
        let answer = rig.post_to(path, "{}").await;
        assert_eq!((answer.body, answer.whole), (format!("{begun}{event}"), false));
        assert_eq!(rig.end().await, Event::Dropped);
    }
}

#[actix_web::test]
async fn a_message_is_observed() {
    let body = r#"{"id":"msg_1","content":[{"type":"tool_use","id":"toolu_1"}],"stop_reason":"tool_use","usage":{"input_tokens":3,"cache_read_input_tokens":2,"output_tokens":1}}"#;
    let worker = fake::worker(move |mut conn: Conn| async move {
        conn.request().await;
        conn.answer(200, body).await;
        conn.closed().await;
    })
    .await;
    let mut rig = Rig::new(vec![direct(&worker)]);
    assert_eq!(rig.post_to("/v1/messages", "{}").await.body, body);
    let Event::Finished(seen) = rig.end().await else { panic!("not finished") };
    assert_eq!((seen.prompt_tokens, seen.cached_tokens, seen.stop), (Some(5), Some(2), StopKind::ToolUse));
    assert_eq!(seen.tool_calls, ["toolu_1"]);
}

#[actix_web::test]
async fn counting_tokens_is_no_turn() {
    let counted = r#"{"input_tokens":7}"#;
    let worker = fake::worker(move |mut conn: Conn| async move {
        let request = conn.request().await.unwrap();
        assert!(request.head.starts_with("POST /v1/messages/count_tokens?beta=true HTTP/1.1"));
        conn.answer(200, counted).await;
        conn.closed().await;
    })
    .await;
    // The first D asked is gone.
    let mut rig = Rig::new(vec![direct(&fake::nobody().await), direct(&worker)]);
    let answer = rig.post_to("/v1/messages/count_tokens?beta=true", "{}").await;
    assert_eq!((answer.status(), answer.body.as_str()), (200, counted));
    assert!(rig.events.try_recv().is_err(), "it was placed");
    let none = Rig::new(vec![]).post_to("/v1/messages/count_tokens", "{}").await;
    assert_eq!((none.status(), none.json()["error"]["type"].as_str()), (503, Some("overloaded_error")));
}

#[actix_web::test]
async fn small_talk() {
    let rig = Rig::new(vec![]);
    let model = rig.get("/v1/models/builtin").await.json();
    assert_eq!((&model, &model["type"]), (&rig.get("/v1/models").await.json()["data"][0], &"model".into()));
    assert_eq!(rig.get("/v1/models/no/such").await.json()["error"]["code"], "model_not_found");
    assert_eq!(rig.bare("HEAD", "/api/hello", "").await.status(), 200);
    let upgrade = "connection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n\
                   sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n";
    let refused = rig.bare("GET", "/v1/responses", upgrade).await;
    assert_eq!((refused.status(), refused.json()["error"]["code"].as_str()), (426, Some("upgrade_required")));
    assert_eq!(rig.get("/v1/responses").await.status(), 405);
}
