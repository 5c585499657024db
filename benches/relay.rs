//! What the gateway's front and relay add to a worker asked directly, without placement: p50 and p90 at one
//! connection, next to a raw TCP relay (the floor). `cargo bench --bench relay`.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream as Blocking};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvc_router::actors::api::{DispatchPlan, Failure, Refusal, WorkerRef};
use kvc_router::actors::gate::{Gate, Permit};
use kvc_router::actors::slot::Role;
use kvc_router::core::types::{Mode, Rung, SessionId, WorkerId};
use kvc_router::engines::client::Connector;
use kvc_router::http::backend::{Backend, Incoming, Turn};
use kvc_router::http::errors::ApiError;
use kvc_router::http::observe::Observed;
use kvc_router::http::{Gateway, server};
use kvc_router::settings::{Layers, Settings};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};

const ROUNDS: usize = 2000;
const EVENTS: usize = 50;

type Failed = Box<dyn std::error::Error>;

/// Places every turn on the one worker.
#[derive(Clone)]
struct Fixed(WorkerRef, Arc<Gate>);

struct FixedTurn(DispatchPlan, #[allow(dead_code)] Permit); // its place at the gate, until it ends

impl Backend for Fixed {
    type Turn = FixedTurn;

    fn gate(&self) -> &Arc<Gate> {
        &self.1
    }

    async fn place(&self, _: Incoming<'_>, permit: Permit) -> Result<FixedTurn, ApiError> {
        let plan = DispatchPlan {
            request_id: "bench".into(),
            session: SessionId::new("scope/bench"),
            one_shot: false,
            mode: Mode::Direct,
            rung: Rung::Append,
            decode: self.0.clone(),
            prefill: None,
            reuse_blocks: 0,
            lease: None,
            restore_blocks: 0,
            sync: Vec::new(),
            slot: None,
            replaced: 0,
        };
        Ok(FixedTurn(plan, permit))
    }

    fn count(&self, incoming: Incoming<'_>) -> Result<u64, ApiError> {
        Ok(incoming.body.len() as u64)
    }

    fn anyone(&self, _: usize) -> Option<WorkerRef> {
        Some(self.0.clone())
    }

    fn ready(&self) -> bool {
        true
    }

    fn models(&self) -> Vec<String> {
        Vec::new()
    }

    async fn sessions(&self) -> Value {
        Value::Null
    }

    async fn workers(&self) -> Value {
        Value::Null
    }
}

impl Turn for FixedTurn {
    fn plan(&self) -> &DispatchPlan {
        &self.0
    }

    async fn failed(self, _: Failure) -> Result<Self, Refusal> {
        Ok(self)
    }

    fn finished(self, _: Observed) {}
}

/// Answers each request at once: a stream when the path says so.
async fn worker(mut stream: TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let json = r#"{"id":"c","choices":[{"message":{"content":"hello"},"finish_reason":"stop"}],"usage":{"prompt_tokens":9,"completion_tokens":1}}"#;
    let json = format!(
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{json}",
        json.len()
    );
    let event = "data: {\"id\":\"c\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"hello\"},\"finish_reason\":null}]}\n\n";
    let piece = format!("{:x}\r\n{event}\r\n", event.len());
    let mut buf = Vec::with_capacity(1 << 20);
    while let Some((head, length)) = request(&mut stream, &mut buf).await? {
        let sse = buf.starts_with(b"POST /v1/completions");
        buf.drain(..head + length);
        if !sse {
            stream.write_all(json.as_bytes()).await?;
            continue;
        }
        stream
            .write_all(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n",
            )
            .await?;
        for _ in 0..EVENTS {
            stream.write_all(piece.as_bytes()).await?;
            tokio::task::yield_now().await;
        }
        stream.write_all(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n").await?;
    }
    Ok(())
}

/// Reads one request; the lengths of its head and body, or `None` at the end of the connection.
async fn request(stream: &mut TcpStream, buf: &mut Vec<u8>) -> std::io::Result<Option<(usize, usize)>> {
    loop {
        if let Some(end) = memchr::memmem::find(buf, b"\r\n\r\n") {
            let head = String::from_utf8_lossy(&buf[..end]).to_lowercase();
            let length = head.split("content-length: ").nth(1).and_then(|t| t.lines().next());
            let length = length.and_then(|t| t.trim().parse().ok()).unwrap_or(0);
            if buf.len() >= end + 4 + length {
                return Ok(Some((end + 4, length)));
            }
        }
        if stream.read_buf(buf).await? == 0 {
            return Ok(None);
        }
    }
}

async fn relay(mut near: TcpStream, to: SocketAddr) -> std::io::Result<()> {
    let mut far = TcpStream::connect(to).await?;
    near.set_nodelay(true)?;
    far.set_nodelay(true)?;
    copy_bidirectional(&mut near, &mut far).await.map(drop)
}

/// Runs a server on its own thread, one task per connection.
fn serve<F>(each: impl Fn(TcpStream) -> F + Send + 'static) -> Result<SocketAddr, Failed>
where
    F: Future<Output = std::io::Result<()>> + Send + 'static,
{
    let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
    listener.set_nonblocking(true)?;
    let addr = listener.local_addr()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    std::thread::spawn(move || {
        runtime.block_on(async move {
            let listener = TcpListener::from_std(listener)?;
            loop {
                let (stream, _) = listener.accept().await?;
                tokio::spawn(each(stream));
            }
            #[allow(unreachable_code)]
            Ok::<(), std::io::Error>(())
        })
    });
    Ok(addr)
}

fn gateway(worker: SocketAddr) -> Result<SocketAddr, Failed> {
    let flags = [("http.listen", "127.0.0.1:0"), ("http.workers", "1")];
    let flags = flags.map(|(k, v)| (k.to_owned(), v.to_owned())).to_vec();
    let settings = Settings::load(&Layers { flags, ..Layers::default() })?.settings;
    let at = WorkerRef {
        id: WorkerId(0),
        role: Role::Decode,
        name: Arc::from("d0"),
        url: Arc::from(format!("http://{worker}")),
        kv_addr: None,
    };
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        actix_web::rt::System::new().block_on(async move {
            let connector = Connector::plain(Duration::from_secs(1));
            if let Ok(serving) = server::start(Gateway::new(&settings, Fixed(at, Gate::new(1024)), connector))
            {
                let _ = tell.send(serving.addrs[0]);
                let _ = serving.server.await;
            }
        });
    });
    Ok(told.recv()?)
}

/// One case: sorted durations of full answers.
fn measure(addr: SocketAddr, request: &[u8], end: &[u8], rounds: usize) -> Result<Vec<Duration>, Failed> {
    let mut stream = Blocking::connect(addr)?;
    stream.set_nodelay(true)?;
    let (mut buf, mut times) = (vec![0; 1 << 16], Vec::new());
    for round in 0..rounds + rounds / 10 {
        let begin = Instant::now();
        stream.write_all(request)?;
        let mut tail = Vec::new();
        while !tail.ends_with(end) {
            let read = stream.read(&mut buf)?;
            if read == 0 {
                return Err("closed".into());
            }
            tail.extend_from_slice(&buf[..read]);
        }
        if round >= rounds / 10 {
            times.push(begin.elapsed());
        }
    }
    times.sort();
    Ok(times)
}

fn main() -> Result<(), Failed> {
    let worker = serve(worker)?;
    let raw = serve(move |near| relay(near, worker))?;
    let gateway = gateway(worker)?;
    println!("{:<16}{:>22}{:>22}{:>22}", "p50 / p90 in µs", "worker", "+ raw relay", "+ gateway");
    for (name, path, size, end, rounds) in [
        ("2 KB", "/v1/chat/completions", 2 << 10, &b"\"completion_tokens\":1}}"[..], ROUNDS),
        ("400 KB", "/v1/chat/completions", 400 << 10, &b"\"completion_tokens\":1}}"[..], ROUNDS / 4),
        ("2 KB, 50 events", "/v1/completions", 2 << 10, &b"\r\n0\r\n\r\n"[..], ROUNDS / 2),
    ] {
        let body = "x".repeat(size);
        let request = format!(
            "POST {path} HTTP/1.1\r\nhost: b\r\ncontent-type: application/json\r\ncontent-length: {size}\r\n\r\n{body}"
        );
        print!("{name:<16}");
        let mut direct = None;
        for addr in [worker, raw, gateway] {
            let times = measure(addr, request.as_bytes(), end, rounds)?;
            let at = |share: usize| times[times.len() * share / 100].as_secs_f64() * 1e6;
            let (base50, base90) = *direct.get_or_insert((at(50), at(90)));
            if addr == worker {
                print!("{:>22}", format!("{:.0} / {:.0}", at(50), at(90)));
            } else {
                print!("{:>22}", format!("{:+.0} / {:+.0}", at(50) - base50, at(90) - base90));
            }
        }
        println!();
    }
    Ok(())
}
