//! What passes: bytes, headers, streams; what is observed on the way.

use std::sync::{Arc, Mutex};

use super::rig::{Event, Rig, direct};
use crate::core::types::StopKind;
use crate::engines::fake::{self, Conn, Seen};
use crate::http::observe::Observed;

const SSE: &str = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n\
                   transfer-encoding: chunked\r\nset-cookie: a=1\r\nset-cookie: b=2\r\nx-kvc-report: {}\r\n\
                   connection: keep-alive, x-hop\r\nx-hop: 1\r\nx-other: kept\r\n\r\n";

fn chunk(text: &str) -> String {
    format!("{:x}\r\n{text}\r\n", text.len())
}

#[actix_web::test]
async fn bytes_and_headers_pass_and_internal_ones_do_not() {
    let seen: Arc<Mutex<Vec<Seen>>> = Arc::default();
    let keep = seen.clone();
    let worker = fake::worker(move |mut conn: Conn| {
        let keep = keep.clone();
        async move {
            while let Some(request) = conn.request().await {
                keep.lock().unwrap().push(request);
                conn.send(SSE).await;
                conn.send(chunk("data: [DONE]\n\n") + "0\r\n\r\n").await;
            }
        }
    })
    .await;
    let rig = Rig::new(vec![direct(&worker)]);
    let body = "{ \"model\" :\"m\",\"x\":1.0,\"x\":2, \"é\":\"\\u00e9\" }\n";
    let headers = "authorization: Bearer k\r\ncookie: c=1\r\ncookie: d=2\r\nx-kvc-plan: forged\r\n\
                   X-Kvc-Session-Id: conv-1\r\nx-kvc-explain: 1\r\nconnection: keep-alive, x-drop\r\n\
                   x-drop: 1\r\nte: trailers\r\naccept-encoding: gzip\r\nx-request-id: mine\r\n\
                   content-type: application/json\r\nx-a: 1\r\nx-a: 2\r\n";
    let answer = rig.post(headers, body).await;

    let seen = seen.lock().unwrap();
    let (request, lower) = (&seen[0], seen[0].head.to_lowercase());
    assert_eq!(request.body, body.as_bytes());
    assert!(lower.starts_with("post /v1/chat/completions?q=1 http/1.1\r\n"));
    assert_eq!(request.header("host"), Some(worker.as_str()));
    assert_eq!(request.header("authorization"), Some("Bearer k"));
    assert_eq!(request.header("x-request-id"), Some("r1"));
    assert_eq!(lower.matches("\r\nx-a: ").count(), 2);
    assert_eq!(lower.matches("\r\ncookie: ").count(), 2);
    assert_eq!(lower.matches("x-kvc-").count(), 1, "only the gateway's own plan: {lower}");
    assert!(!lower.contains("forged") && !lower.contains("x-drop") && !lower.contains("\r\nte:"));
    assert!(!lower.contains("gzip"));

    assert_eq!((answer.status(), answer.whole), (200, true));
    assert_eq!(answer.header("x-kvc-mode"), "direct");
    assert_eq!(answer.header("x-kvc-reason"), "append");
    assert_eq!(answer.header("x-kvc-worker"), "w1");
    assert_eq!(answer.header("x-kvc-session"), "conv-1");
    assert_eq!(answer.header("content-type"), "text/event-stream; charset=utf-8");
    assert_eq!(answer.headers("set-cookie"), ["a=1", "b=2"]);
    assert_eq!(answer.header("x-other"), "kept");
    for gone in ["x-kvc-report", "x-hop", "x-kvc-replaced"] {
        assert!(answer.headers(gone).is_empty(), "{gone}");
    }
}

#[actix_web::test]
async fn a_stream_arrives_piece_by_piece_and_its_usage_is_reported() {
    let (pieces, receiver) = tokio::sync::mpsc::unbounded_channel::<String>();
    let receiver = Arc::new(tokio::sync::Mutex::new(receiver));
    let worker = fake::worker(move |mut conn: Conn| {
        let receiver = receiver.clone();
        async move {
            conn.request().await;
            conn.send(SSE).await;
            let mut receiver = receiver.lock().await;
            while let Some(piece) = receiver.recv().await {
                conn.send(piece).await;
            }
        }
    })
    .await;
    let mut rig = Rig::new(vec![direct(&worker)]);
    let mut client = rig.open("", "{}").await;
    let events = [
        "data: {\"id\":\"c1\",\"choices\":[{\"delta\":{\"content\":\"one\"}}]}\n\n",
        "data: {\"id\":\"c1\",\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n",
        "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":5,\"completion_tokens\":2,\"prompt_tokens_details\":{\"cached_tokens\":4}}}\n\n",
        "data: [DONE]\n\n",
    ];
    for event in events {
        // Each piece is here before the next one is written: nothing waits for more.
        pieces.send(chunk(event)).unwrap();
        client.until(event).await;
    }
    pieces.send("0\r\n\r\n".into()).unwrap();
    let answer = client.answer().await;
    assert_eq!((answer.body, answer.whole), (events.concat(), true));
    let expected = Observed {
        prompt_tokens: Some(5),
        completion_tokens: Some(2),
        cached_tokens: Some(4),
        stop: StopKind::EndTurn,
        response_id: Some("c1".into()),
        complete: true,
        ..Observed::default()
    };
    assert_eq!(rig.end().await, Event::Finished(expected));
}

#[actix_web::test]
async fn a_json_answer_keeps_its_length_and_a_large_one_passes() {
    let text = "x".repeat(3 << 20);
    let body = format!(
        "{{\"choices\":[{{\"message\":{{\"content\":\"{text}\"}},\"finish_reason\":\"length\"}}],\"usage\":{{\"prompt_tokens\":3}}}}"
    );
    let sent = body.clone();
    let worker = fake::worker(move |mut conn: Conn| {
        let sent = sent.clone();
        async move {
            while conn.request().await.is_some() {
                conn.answer(200, &sent).await;
            }
        }
    })
    .await;
    let mut rig = Rig::new(vec![direct(&worker)]);
    // A request body of several MB as well.
    let answer = rig.post("", format!("{{\"model\":\"{text}\"}}")).await;
    assert_eq!(answer.header("content-length"), body.len().to_string());
    assert_eq!(answer.body, body);
    let expected = Observed { prompt_tokens: Some(3), complete: true, ..Observed::default() };
    assert_eq!(rig.end().await, Event::Finished(expected));
}

#[actix_web::test]
async fn a_chunked_request_is_one_body_and_explain_needs_permission() {
    for (setting, expected) in [("true", true), ("false", false)] {
        let mut rig = Rig::with(&[("explain", setting)], vec![]);
        let mut client = rig.connect().await;
        let request = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-kvc-explain: 1\r\n\
                       transfer-encoding: chunked\r\n\r\n3\r\n{\"a\r\n3\r\n\":1\r\n1\r\n}\r\n0\r\n\r\n";
        tokio::io::AsyncWriteExt::write_all(&mut client.0, request.as_bytes()).await.unwrap();
        assert_eq!(client.answer().await.status(), 429);
        let placed =
            Event::Placed { path: "/v1/completions", body: b"{\"a\":1}".to_vec(), explain: expected };
        assert_eq!(rig.events.recv().await.unwrap(), placed);
    }
}

#[actix_web::test]
async fn the_other_paths_answer() {
    let rig = Rig::new(vec![direct("127.0.0.1:9")]);
    assert_eq!(rig.get("/health").await.body, "{\"status\":\"ok\"}");
    assert_eq!(rig.get("/ready").await.status(), 200);
    assert_eq!(rig.get("/v1/models").await.json()["data"][0]["id"], "builtin");
    assert!(rig.get("/metrics").await.status() == 200);
    assert_eq!(rig.get("/admin/sessions").await.body, "{\"sessions\":[]}");
    assert_eq!(rig.get("/admin/workers").await.body, "{\"workers\":[]}");
    let missing = rig.get("/v1/nothing").await;
    assert_eq!((missing.status(), missing.json()["error"]["code"].as_str()), (404, Some("not_found")));
    assert_eq!(rig.get("/v1/chat/completions").await.status(), 405);
    let idle = Rig::new(vec![]).get("/ready").await;
    assert_eq!((idle.status(), idle.header("retry-after")), (503, "1"));
}
