//! Scripted workers for tests: real sockets, every byte under the test's control.

use std::future::Future;
use std::sync::Arc;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::actors::api::WorkerRef;
use crate::actors::slot::Role;
use crate::core::types::WorkerId;

/// One accepted connection.
pub(crate) struct Conn {
    stream: TcpStream,
    buf: Vec<u8>,
}

/// A request as it arrived.
pub(crate) struct Seen {
    /// Head, as text.
    pub head: String,
    /// Body.
    pub body: Vec<u8>,
}

impl Seen {
    /// Value of a header.
    pub fn header(&self, name: &str) -> Option<&str> {
        let line = self
            .head
            .lines()
            .find(|l| l.split_once(':').is_some_and(|(n, _)| n.eq_ignore_ascii_case(name)))?;
        line.split_once(':').map(|(_, value)| value.trim())
    }
}

impl Conn {
    /// Reads one request; `None` at the end of the connection.
    pub async fn request(&mut self) -> Option<Seen> {
        let end = loop {
            if let Some(at) = self.buf.windows(4).position(|w| w == b"\r\n\r\n") {
                break at + 4;
            }
            self.read().await?;
        };
        let head = String::from_utf8(self.buf.drain(..end).collect()).unwrap();
        let seen = Seen { head, body: Vec::new() };
        let len: usize = seen.header("content-length").unwrap_or("0").parse().unwrap();
        while self.buf.len() < len {
            self.read().await?;
        }
        Some(Seen { body: self.buf.drain(..len).collect(), ..seen })
    }

    async fn read(&mut self) -> Option<()> {
        (self.stream.read_buf(&mut self.buf).await.ok()? > 0).then_some(())
    }

    /// Writes bytes.
    pub async fn send(&mut self, text: impl AsRef<[u8]>) {
        self.try_send(text).await;
    }

    /// Writes bytes; `false` when the other side is gone.
    pub async fn try_send(&mut self, text: impl AsRef<[u8]>) -> bool {
        self.stream.write_all(text.as_ref()).await.is_ok()
    }

    /// Writes a whole JSON answer.
    pub async fn answer(&mut self, status: u16, body: &str) {
        let head = format!(
            "HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        self.send(head + body).await;
    }

    /// Resolves when the other side closes.
    pub async fn closed(&mut self) {
        while self.read().await.is_some() {}
    }
}

/// Starts a worker that runs `script` on each connection. Returns `host:port`.
pub(crate) async fn worker<F, Fut>(script: F) -> String
where
    F: Fn(Conn) -> Fut + 'static,
    Fut: Future<Output = ()> + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap().to_string();
    actix_web::rt::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            stream.set_nodelay(true).unwrap();
            actix_web::rt::spawn(script(Conn { stream, buf: Vec::new() }));
        }
    });
    addr
}

/// An address nobody listens on.
pub(crate) async fn nobody() -> String {
    TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().to_string()
}

/// A worker's reference.
pub(crate) fn worker_ref(id: u32, addr: &str) -> WorkerRef {
    WorkerRef {
        id: WorkerId(id),
        role: if id == 0 { Role::Prefill } else { Role::Decode },
        name: Arc::from(format!("w{id}")),
        url: Arc::from(format!("http://{addr}")),
        kv_addr: Some(Arc::from("127.0.0.1:9")),
    }
}

/// A scripted engine: answers each request by its method and path. `None`: the connection is closed on it.
pub(crate) async fn engine<F>(script: F) -> String
where
    F: Fn(&str, &Seen) -> Option<(u16, String)> + Clone + 'static,
{
    worker(move |mut conn: Conn| {
        let script = script.clone();
        async move {
            while let Some(seen) = conn.request().await {
                let line = seen.head.lines().next().unwrap_or_default().to_owned();
                let line = line.trim_end_matches(" HTTP/1.1").split('?').next().unwrap_or_default();
                let Some((status, body)) = script(line, &seen) else { return };
                conn.answer(status, &body).await;
            }
        }
    })
    .await
}

/// What llama.cpp says of itself, with `slots` slots of `n_ctx` tokens, after `work` prompt tokens.
pub(crate) fn llama(line: &str, slots: u32, n_ctx: u32, work: u64) -> Option<(u16, String)> {
    let body = match line {
        "GET /health" => r#"{"status":"ok"}"#.to_owned(),
        "GET /v1/models" => r#"{"data":[{"id":"m"}]}"#.to_owned(),
        "GET /props" => {
            format!(r#"{{"total_slots":{slots},"default_generation_settings":{{"n_ctx":{n_ctx}}}}}"#)
        }
        "GET /metrics" => format!("llamacpp:prompt_tokens_total {work}\nllamacpp:requests_processing 0\n"),
        _ => return None,
    };
    Some((200, body))
}
