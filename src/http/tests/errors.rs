//! Every failure has an answer in the API's shape, and nothing internal in it.

use super::rig::{Answer, Event, Rig, direct, refusal};
use crate::actors::api::Failure;
use crate::engines::client::Connector;
use crate::engines::fake::{self, Conn};
use crate::http::errors::ApiError;

fn check(answer: &Answer, status: u16, code: &str) {
    assert_eq!(answer.status(), status, "{answer:?}");
    assert_eq!(answer.header("content-type"), "application/json");
    let json = answer.json();
    assert_eq!(json["error"]["code"], code);
    assert!(json["error"]["message"].is_string() && json["error"]["type"].is_string());
    assert_eq!(answer.header("x-kvc-reason"), code);
    assert!(!answer.body.contains("127.0.0.1"), "{}", answer.body);
    let retry = answer.headers("retry-after").len();
    assert_eq!(retry == 1, status == 429 || status == 503);
}

#[actix_web::test]
async fn bad_requests_are_told_so() {
    let bad = ApiError::bad_body("`model` is missing", Some("model".into()));
    let unknown = ApiError::model_not_found("gpt-\"9\"");
    let rig = Rig::with(&[("body_limit_mib", "1")], vec![Err(bad), Err(unknown)]);
    let answer = rig.post("", "{}").await;
    check(&answer, 400, "invalid_request");
    assert_eq!(answer.json()["error"]["param"], "model");
    assert_eq!(answer.header("x-kvc-mode"), "failed");
    check(&rig.post("", "{}").await, 404, "model_not_found");
    check(&rig.post("", vec![b'x'; (1 << 20) + 1]).await, 413, "request_too_large");
    check(&rig.post("content-encoding: gzip\r\n", "x").await, 415, "unsupported_encoding");
    let answer = rig.post("", "{}").await;
    check(&answer, 429, "no_capacity");
    assert_eq!((answer.header("retry-after"), answer.header("x-kvc-mode")), ("7", "rejected"));
}

#[actix_web::test]
async fn a_chunked_body_over_the_limit_is_cut_short() {
    let rig = Rig::with(&[("body_limit_mib", "1")], vec![]);
    let mut client = rig.connect().await;
    let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n";
    let piece = format!("10000\r\n{}\r\n", "x".repeat(0x10000));
    let wire = head.to_owned() + &piece.repeat(17);
    tokio::io::AsyncWriteExt::write_all(&mut client.0, wire.as_bytes()).await.unwrap();
    check(&client.answer().await, 413, "request_too_large");
}

#[actix_web::test]
async fn a_dead_worker_costs_nothing_while_another_lives() {
    let good = fake::worker(|mut conn: Conn| async move {
        conn.request().await;
        conn.answer(200, "{}").await;
        conn.closed().await;
    })
    .await;
    let dying = fake::worker(|mut conn: Conn| async move {
        conn.request().await;
    })
    .await;
    let mut second = direct(&dying);
    let mut third = direct(&good);
    (second.replaced, third.replaced) = (1, 2);
    let mut rig = Rig::new(vec![direct(&fake::nobody().await), second, third]);
    let answer = rig.post("", "{}").await;
    assert_eq!((answer.status(), answer.header("x-kvc-replaced")), (200, "2"));
    assert_eq!(rig.end().await, Event::Failed(Failure::DecodeUnreachable));
    assert_eq!(rig.end().await, Event::Failed(Failure::DecodeUnreachable));
    assert!(matches!(rig.end().await, Event::Finished(_)));
}

#[actix_web::test]
async fn endless_failures_end() {
    let nobody = fake::nobody().await;
    let mut rig = Rig::new(vec![direct(&nobody); 9]);
    check(&rig.post("", "{}").await, 502, "worker_died");
    for _ in 0..3 {
        assert_eq!(rig.end().await, Event::Failed(Failure::DecodeUnreachable));
    }
    assert_eq!(rig.end().await, Event::Dropped);
    let mut rig = Rig::new(vec![direct(&nobody)]);
    check(&rig.post("", "{}").await, refusal().status, refusal().code);
    assert_eq!(rig.end().await, Event::Failed(Failure::DecodeUnreachable));
}

#[actix_web::test]
async fn a_workers_own_error_passes() {
    let body =
        r#"{"error":{"message":"too long","type":"invalid_request_error","code":"context_length_exceeded"}}"#;
    let worker = fake::worker(move |mut conn: Conn| async move {
        conn.request().await;
        conn.answer(400, body).await;
        conn.closed().await;
    })
    .await;
    let mut rig = Rig::new(vec![direct(&worker)]);
    let answer = rig.post("", "{}").await;
    assert_eq!((answer.status(), answer.body.as_str(), answer.header("x-kvc-mode")), (400, body, "failed"));
    assert_eq!(rig.end().await, Event::Dropped);
}

#[actix_web::test]
async fn a_silent_worker_is_a_timeout() {
    let silent = fake::worker(|mut conn: Conn| async move {
        conn.request().await;
        conn.closed().await;
    })
    .await;
    let mut rig = Rig::with(&[("first_byte_timeout_s", "1")], vec![Ok(direct(&silent))]);
    check(&rig.post("", "{}").await, 504, "worker_timeout");
    assert_eq!(rig.end().await, Event::Dropped);
}

#[actix_web::test]
async fn a_death_in_mid_stream_never_looks_like_an_end() {
    const HEAD: &str =
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
    let event = "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n";
    let cases = [
        (format!("{HEAD}{:x}\r\n{event}\r\n", event.len()), ""),
        // A worker that ends its transfer in order but not its stream.
        (format!("{HEAD}{:x}\r\n{event}\r\n0\r\n\r\n", event.len()), ""),
        (format!("{HEAD}{:x}\r\n{}\r\n", event.len() - 5, &event[..event.len() - 5]), "\n\n"),
    ];
    for (wire, gap) in cases {
        let worker = fake::worker(move |mut conn: Conn| {
            let wire = wire.clone();
            async move {
                conn.request().await;
                conn.send(&wire).await;
            }
        })
        .await;
        let mut rig = Rig::new(vec![direct(&worker)]);
        let answer = rig.post("", "{}").await;
        assert!(!answer.whole);
        let (_, error) = answer.body.split_once(&format!("{gap}data: {{\"error\"")).expect(&answer.body);
        assert!(error.contains("worker_died") && error.ends_with("\n\n"), "{error}");
        assert!(!answer.body.contains("[DONE]"));
        assert_eq!(rig.end().await, Event::Dropped);
    }
    let worker = fake::worker(|mut conn: Conn| async move {
        conn.request().await;
        conn.send("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{").await;
    })
    .await;
    let answer = Rig::new(vec![direct(&worker)]).post("", "{}").await;
    assert_eq!((answer.body.as_str(), answer.whole), ("{", false));
}

#[actix_web::test]
async fn too_many_requests_are_refused_before_their_body() {
    let worker = fake::worker(|mut conn: Conn| async move {
        conn.request().await;
        conn.closed().await;
    })
    .await;
    let mut rig = Rig::with(&[("max_inflight", "1")], vec![Ok(direct(&worker)), Ok(direct(&worker))]);
    let first = rig.open("", "{}").await;
    assert!(matches!(rig.events.recv().await, Some(Event::Placed { .. })));
    check(&rig.post("", "{}").await, 429, "overloaded");
    drop(first);
    assert_eq!(rig.end().await, Event::Dropped);
    let _second = rig.open("", "{}").await;
    assert!(matches!(rig.events.recv().await, Some(Event::Placed { .. })));
}

#[actix_web::test]
async fn a_port_in_use_is_one_clear_line() {
    use crate::http::{Gateway, server};
    use crate::settings::{Layers, Settings};
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let listen = taken.local_addr().unwrap().to_string();
    let flags = vec![("http.listen".to_owned(), listen.clone())];
    let settings = Settings::load(&Layers { flags, ..Layers::default() }).unwrap().settings;
    let (tell, _keep) = tokio::sync::mpsc::unbounded_channel();
    let error = server::start(Gateway::new(
        &settings,
        super::rig::Script::empty(tell),
        Connector::plain(std::time::Duration::from_secs(1)),
    ))
    .err()
    .unwrap();
    let expected = format!("cannot listen on {listen} (http.listen): the port is in use");
    assert_eq!(error.to_string(), expected);
}
