//! Many clients that leave at once, and what the logs say of it all.

use std::io;
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tracing_subscriber::fmt::MakeWriter;

use super::*;

async fn open(world: &World, i: usize) -> TcpStream {
    let mut body = prompt(60);
    body["stream"] = true.into();
    body["messages"][0]["content"] = format!("{i} {}", body["messages"][0]["content"]).into();
    let body = body.to_string();
    let mut stream = TcpStream::connect(world.url.trim_start_matches("http://")).await.unwrap();
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-session-id: s{i}\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all((head + &body).as_bytes()).await.unwrap();
    stream
}

/// In any state: before the head, waiting for room, between P and D, in mid-stream. All gauges go back to zero.
#[actix_web::test]
async fn five_hundred_clients_leave_nothing_anywhere() {
    let world = World::start(&[]).await;
    let mut clients = Vec::new();
    for i in 0..500 {
        clients.push(open(&world, i).await);
    }
    // Some have an answer under way, some have none yet.
    let mut first = [0; 1];
    clients[0].read_exact(&mut first).await.unwrap();
    drop(clients);
    world.assert_clean().await;
    while world.router.totals().running > 0 {
        tokio::task::yield_now().await;
    }
    let totals = world.router.totals();
    assert_eq!(totals.served + totals.rejected + totals.failed, 500, "{totals:?}");
    for node in &world.nodes {
        node.audit().unwrap();
    }
    let router = world.router.turns().router().await.unwrap();
    assert_eq!(router.waiting, 0);
}

#[derive(Clone, Default)]
struct Captured(Arc<Mutex<Vec<u8>>>);

impl io::Write for Captured {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Captured {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

/// Everything this crate logs, at its most talkative, holds no prompt, no answer and no key.
#[actix_web::test]
async fn logs_hold_no_prompt_and_no_key() {
    let captured = Captured::default();
    let logs = tracing_subscriber::fmt().with_env_filter("kvc_router=trace").with_writer(captured.clone());
    // This process's other tests are logged too, which proves as much.
    logs.try_init().unwrap();
    let mut world = World::start(&[("fleet.worker_key", "worker-secret")]).await;
    let mut body = prompt(300);
    body["messages"][0]["content"] = "prompt-secret".into();
    let ask = || {
        let request = Request::post(format!("{}/v1/chat/completions", world.url));
        request.header("authorization", "Bearer client-secret").header("x-session-id", "log-me")
    };
    let (status, _, _) = send(ask(), body.to_string().into()).await;
    assert_eq!(status, StatusCode::OK);
    // Failures say most.
    for node in std::mem::take(&mut world.nodes) {
        node.stop().await;
    }
    let ask = Request::post(format!("{}/v1/chat/completions", world.url));
    send(ask.header("authorization", "Bearer client-secret"), body.to_string().into()).await;
    send(Request::post(format!("{}/v1/chat/completions", world.url)), "{\"prompt-secret".into()).await;
    let text = String::from_utf8_lossy(&captured.0.lock().unwrap()).into_owned();
    assert!(text.contains("a worker is up"), "nothing was captured");
    for secret in ["prompt-secret", "client-secret", "worker-secret"] {
        assert!(!text.contains(secret), "{secret} is in the logs");
    }
}
