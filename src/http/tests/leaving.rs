//! A client that leaves: the worker sees it at once, whatever the turn was doing.

use std::time::{Duration, Instant};

use tokio::sync::mpsc;

use super::rig::{Event, Rig, direct};
use crate::core::types::{Mode, Rung};
use crate::engines::fake::{self, Conn};

/// The promise.
const SOON: Duration = Duration::from_millis(100);

const HEAD: &str = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
const EVENT: &str = "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n";
const END: &str = "data: {\"choices\":[{\"finish_reason\":\"stop\"}]}\n\n";

/// A worker that sends `wire` and then nothing; says when it began and when it saw the close.
async fn worker(wire: String) -> (String, mpsc::UnboundedReceiver<&'static str>) {
    let (tell, told) = mpsc::unbounded_channel();
    let addr = fake::worker(move |mut conn: Conn| {
        let (wire, tell) = (wire.clone(), tell.clone());
        async move {
            conn.request().await;
            conn.send(wire).await;
            let _ = tell.send("begun");
            conn.closed().await;
            let _ = tell.send("closed");
        }
    })
    .await;
    (addr, told)
}

#[actix_web::test]
async fn in_silence_before_the_head() {
    let (addr, mut told) = worker(String::new()).await;
    let mut rig = Rig::new(vec![direct(&addr)]);
    let client = rig.open("", "{}").await;
    assert_eq!(told.recv().await, Some("begun"));
    let left = Instant::now();
    drop(client);
    assert_eq!(told.recv().await, Some("closed"));
    assert!(left.elapsed() < SOON, "{:?}", left.elapsed());
    assert_eq!(rig.end().await, Event::Dropped);
}

#[actix_web::test]
async fn in_silence_after_the_head_and_in_mid_stream() {
    for wire in [HEAD.to_owned(), format!("{HEAD}{:x}\r\n{EVENT}\r\n", EVENT.len())] {
        let streams = wire.len() > HEAD.len();
        let (addr, mut told) = worker(wire).await;
        let mut rig = Rig::new(vec![direct(&addr)]);
        let mut client = rig.open("", "{}").await;
        assert_eq!(told.recv().await, Some("begun"));
        if streams {
            client.until("data: ").await;
        }
        let left = Instant::now();
        drop(client);
        assert_eq!(told.recv().await, Some("closed"));
        assert!(left.elapsed() < SOON, "{:?}", left.elapsed());
        assert_eq!(rig.end().await, Event::Dropped);
    }
}

#[actix_web::test]
async fn between_p_and_d() {
    let ((p, mut p_told), (d, mut d_told)) = (worker(String::new()).await, worker(String::new()).await);
    let mut plan = direct(&d);
    (plan.mode, plan.rung, plan.prefill) = (Mode::Seed, Rung::Full, Some(fake::worker_ref(0, &p)));
    let mut rig = Rig::new(vec![plan]);
    let client = rig.open("", "{}").await;
    assert_eq!((p_told.recv().await, d_told.recv().await), (Some("begun"), Some("begun")));
    let left = Instant::now();
    drop(client);
    assert_eq!((p_told.recv().await, d_told.recv().await), (Some("closed"), Some("closed")));
    assert!(left.elapsed() < SOON, "{:?}", left.elapsed());
    assert_eq!(rig.end().await, Event::Dropped);
}

#[actix_web::test]
async fn a_client_that_stops_reading_holds_no_memory_and_may_leave() {
    let (tell, mut told) = mpsc::unbounded_channel();
    let addr = fake::worker(move |mut conn: Conn| {
        let tell = tell.clone();
        async move {
            conn.request().await;
            conn.send(HEAD).await;
            let piece = format!("10000\r\n{}\n\r\n", "x".repeat(0xffff));
            let mut sent = 0usize;
            // Ends with the connection: the client never reads.
            while conn.try_send(&piece).await {
                sent += piece.len();
                let _ = tell.send(Some(sent));
            }
            let _ = tell.send(None);
        }
    })
    .await;
    let mut rig = Rig::new(vec![direct(&addr)]);
    let mut client = rig.open("", "{}").await;
    client.until("\r\n\r\n").await;
    // What fits into the sockets' buffers goes out; then the worker is held back.
    let mut sent = 0;
    while let Ok(Some(more)) = tokio::time::timeout(Duration::from_millis(300), told.recv()).await {
        sent = more.expect("the connection is open");
        assert!(sent < 64 << 20, "nothing holds the worker back");
    }
    assert!(sent > 0);
    drop(client);
    assert_eq!(rig.end().await, Event::Dropped);
    while told.recv().await.flatten().is_some() {} // the worker sees the close
}

#[actix_web::test]
async fn at_the_last_event_is_no_cancellation() {
    let (addr, mut told) = worker(format!("{HEAD}{:x}\r\n{END}\r\n", END.len())).await;
    let mut rig = Rig::new(vec![direct(&addr)]);
    let mut client = rig.open("", "{}").await;
    client.until("finish_reason").await;
    drop(client);
    assert!(matches!(rig.end().await, Event::Finished(seen) if seen.complete));
    assert_eq!((told.recv().await, told.recv().await), (Some("begun"), Some("closed")));
}

#[actix_web::test]
async fn five_hundred_at_once_leave_nothing() {
    const CLIENTS: usize = 500;
    let (addr, mut told) = worker(String::new()).await;
    let mut rig = Rig::new(vec![direct(&addr); CLIENTS]);
    let mut clients = Vec::new();
    for _ in 0..CLIENTS {
        clients.push(rig.open("", "{}").await);
    }
    for _ in 0..CLIENTS {
        assert_eq!(told.recv().await, Some("begun"));
    }
    drop(clients);
    for _ in 0..CLIENTS {
        assert_eq!(told.recv().await, Some("closed"));
        assert_eq!(rig.end().await, Event::Dropped);
    }
}
