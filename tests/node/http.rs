//! Paths, shapes and bad input.

use kvc_router::node::{Node, reference_text};
use kvc_router::prompt::Api;
use kvc_router::wire::info::{KvRole, NodeInfo};

use super::world::*;

#[tokio::test]
async fn a_node_says_what_it_is() {
    let (p, d) = (prefill().await, decode().await);
    for node in [&p, &d] {
        assert_eq!(get(node, "/health").await.status, 200);
        assert_eq!(get(node, "/ready").await.status, 200);
    }
    let info: NodeInfo = serde_json::from_value(get(&d, "/kvc/info").await.json()).unwrap();
    assert_eq!(&info, d.info());
    assert_eq!((info.kv_addr, info.roles), (d.kv_addr().map(|a| a.to_string()), vec![KvRole::Decode]));
    assert!(p.info().kv_addr.is_none() && p.info().epoch != 0);
    assert_eq!(get(&d, "/v1/models").await.json()["data"][0]["id"], MODEL);
}

#[tokio::test]
async fn bad_input_is_answered_in_openai_form() {
    let mut config = config("d", KvRole::Decode);
    config.limits.body_bytes = 2000;
    let d = Node::start(config).await.unwrap();
    let chat = |body: &str| plain(&d, body.as_bytes().to_vec());
    let cases = [
        (chat("{").await, 400),
        (chat("[]").await, 400),
        (chat(r#"{"model":"kvc-builtin"}"#).await, 400),
        (chat(r#"{"model":"kvc-builtin","messages":7}"#).await, 400),
        (chat(r#"{"model":"other","messages":[]}"#).await, 404),
        (chat(&"x".repeat(2001)).await, 413),
        (get(&d, "/nothing").await, 404),
        (get(&d, "/v1/chat/completions").await, 405),
        (post(&d, "/admit_direct_append", "application/x-kvc-admit", "abc").await, 400),
        (post(&d, "/kvc/leases/renew", "application/json", "abc").await, 400),
    ];
    for (i, (answer, status)) in cases.iter().enumerate() {
        assert_eq!(answer.status.as_u16(), *status, "case {i}: {}", answer.body);
        let error = &answer.json()["error"];
        assert!(error["message"].is_string() && error["type"].is_string() && error["code"].is_string());
    }
    at_rest(&d).await;
}

#[tokio::test]
async fn completions_stream_and_not() {
    let d = decode().await;
    let body = |stream: bool| {
        serde_json::json!({"model": MODEL, "prompt": words("bare", 200), "stream": stream, "max_tokens": 12})
            .to_string()
    };
    let reference = reference_text(MODEL, Api::Completions, body(false).as_bytes()).unwrap();
    let answer = post(&d, "/v1/completions", "application/json", body(false)).await;
    let whole = answer.json();
    assert_eq!(
        (whole["object"].as_str(), whole["choices"][0]["text"].as_str()),
        (Some("text_completion"), Some(&*reference))
    );
    assert_eq!(answer.usage(), (200, 12, 0));
    let answer = post(&d, "/v1/completions", "application/json", body(true)).await;
    let text: String =
        answer.events().iter().filter_map(|e| e["choices"][0]["text"].as_str().map(String::from)).collect();
    assert_eq!(text, reference);
    assert!(answer.body.ends_with("data: [DONE]\n\n") && !answer.body.contains("usage"));
}

#[tokio::test]
async fn a_port_in_use_is_named() {
    let d = decode().await;
    let mut second = config("e", KvRole::Decode);
    second.http_port = d.http_addr().port();
    let error = Node::start(second).await.unwrap_err().to_string();
    assert!(error.contains(&d.http_addr().to_string()), "{error}");
}

#[tokio::test]
async fn draining_lets_running_turns_end() {
    let mut slow = config("d", KvRole::Decode);
    slow.cost.time_scale = 20.0;
    let d = Node::start(slow).await.unwrap();
    let chat = Chat::new(words("drain", 300));
    let request = request(&d, &fallback("t", Some("s")), chat.body(true));
    let client = client();
    let turn = async {
        use http_body_util::BodyExt;
        let body = client.request(request).await.unwrap().into_body().collect().await.unwrap();
        String::from_utf8(body.to_bytes().to_vec()).unwrap()
    };
    let engine = d.engine().clone();
    let drain = async {
        let mut changes = engine.changes();
        while engine.with(|s, _| s.running()) == 0 {
            changes.changed().await;
        }
        d.drain(std::time::Duration::from_secs(10)).await;
    };
    let (body, ()) = tokio::join!(turn, drain);
    assert!(body.ends_with("data: [DONE]\n\n"), "{body}");
}
