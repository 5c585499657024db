use std::cell::Cell;

use super::*;
use crate::engines::fake::{self, Conn};

fn client() -> Client {
    Client::new(Connector::plain(Duration::from_secs(5)))
}

async fn send(client: &Client, addr: &str, body: &[u8]) -> Result<Response, SendError> {
    let request = Request::post("/v1/x?y=1", Bytes::copy_from_slice(body));
    client.send(&format!("http://{addr}/base"), &request, &[("x-extra", b"1")]).await
}

async fn all(mut response: Response) -> Result<Vec<u8>, BodyError> {
    let mut out = Vec::new();
    while let Some(data) = response.body.chunk().await? {
        out.extend_from_slice(&data);
    }
    Ok(out)
}

/// A worker that answers every connection's first request with `wire`, then closes.
async fn once(wire: &'static str) -> String {
    fake::worker(move |mut conn: Conn| async move {
        conn.request().await;
        conn.send(wire).await;
    })
    .await
}

#[actix_web::test]
async fn a_request_arrives_whole_and_a_connection_serves_again() {
    let connections = Rc::new(Cell::new(0));
    let count = connections.clone();
    let addr = fake::worker(move |mut conn: Conn| {
        count.set(count.get() + 1);
        async move {
            while let Some(seen) = conn.request().await {
                assert!(seen.head.starts_with("POST /base/v1/x?y=1 HTTP/1.1\r\n"), "{}", seen.head);
                assert_eq!(seen.header("x-extra"), Some("1"));
                conn.answer(200, std::str::from_utf8(&seen.body).unwrap()).await;
            }
        }
    })
    .await;
    let client = client();
    for body in ["one", "two", ""] {
        let response = send(&client, &addr, body.as_bytes()).await.unwrap();
        assert_eq!(all(response).await.unwrap(), body.as_bytes());
    }
    assert_eq!(connections.get(), 1);
}

#[actix_web::test]
async fn a_closed_idle_connection_is_not_used() {
    let addr = once("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await;
    let client = client();
    for _ in 0..3 {
        let response = send(&client, &addr, b"x").await.unwrap();
        assert_eq!(all(response).await.unwrap(), b"ok");
    }
}

#[actix_web::test]
async fn a_broken_body_is_an_error_and_a_whole_one_is_not() {
    let cut = [
        "HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nok",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n",
    ];
    for wire in cut {
        let response = send(&client(), &once(wire).await, b"x").await.unwrap();
        assert_eq!(all(response).await, Err(BodyError::Closed), "{wire}");
    }
    let whole = [
        "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        "HTTP/1.1 200 OK\r\n\r\nok",
        "HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok",
    ];
    for wire in whole {
        let response = send(&client(), &once(wire).await, b"x").await.unwrap();
        assert_eq!(all(response).await.unwrap(), b"ok", "{wire}");
    }
}

#[actix_web::test]
async fn failures_before_the_head_are_told_apart() {
    let error = |result: Result<Response, SendError>| result.unwrap_err();
    assert_eq!(error(send(&client(), &fake::nobody().await, b"x").await), SendError::Connect);
    for wire in ["", "HTTP/1.1 200 OK\r\ncontent-le"] {
        assert_eq!(error(send(&client(), &once(wire).await, b"x").await), SendError::Closed);
    }
    let malformed = [
        "nonsense\r\n\r\n",
        "HTTP/1.1 101 X\r\n\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length: +1\r\n\r\n",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\n",
    ];
    for wire in malformed {
        let error = error(send(&client(), &once(wire).await, b"x").await);
        assert!(matches!(error, SendError::Malformed(_)), "{wire}: {error}");
    }
}

#[actix_web::test]
async fn an_answer_before_the_body_was_read_is_read() {
    let addr = fake::worker(|mut conn: Conn| async move {
        conn.answer(413, "{}").await;
        std::future::pending::<()>().await;
        drop(conn);
    })
    .await;
    let response = send(&client(), &addr, &vec![b'x'; 64 << 20]).await.unwrap();
    assert_eq!(response.status, StatusCode::PAYLOAD_TOO_LARGE);
}

#[actix_web::test]
async fn dropping_closes_the_connection() {
    let (told, mut closed) = tokio::sync::mpsc::unbounded_channel();
    let addr = fake::worker(move |mut conn: Conn| {
        let told = told.clone();
        async move {
            let seen = conn.request().await.unwrap();
            if seen.body == b"head" {
                conn.send("HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nok").await;
            }
            told.send("begun").unwrap();
            conn.closed().await;
            told.send("closed").unwrap();
        }
    })
    .await;
    let client = client();
    let mut silent = Box::pin(send(&client, &addr, b"silent"));
    tokio::select! {
        _ = &mut silent => panic!("no answer expected"),
        begun = closed.recv() => assert_eq!(begun, Some("begun")),
    }
    drop(silent);
    assert_eq!(closed.recv().await, Some("closed"));
    let response = send(&client, &addr, b"head").await.unwrap();
    assert_eq!(closed.recv().await, Some("begun"));
    drop(response);
    assert_eq!(closed.recv().await, Some("closed"));
}
