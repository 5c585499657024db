//! A small HTTP/1.1 client for workers, on `httparse`.
//!
//! Why not a ready one: `awc` reports a body that broke off as a clean end and does not look for an answer
//! before its request body is out; `reqwest` and `hyper-util` cost two to three times as much per relayed
//! SSE stream. What a relay needs is little: POST a ready body, read one response, hand its bytes on as they
//! come, and close the connection the moment nobody wants them any more (drop the future or the body).

mod body;
mod decode;
mod head;
mod stream;

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::time::{Duration, Instant};

use actix_web::http::StatusCode;
use actix_web::http::header::{HeaderName, HeaderValue};
use bytes::{Buf, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};

use crate::prompt::Api;
pub use body::{Body, BodyError};
use head::ResponseHead;
pub use stream::Connector;
use stream::Stream;

/// An idle connection is used again for this long: under the 5 s after which common servers close it.
const IDLE: Duration = Duration::from_secs(4);
/// Idle connections kept per worker and thread.
const IDLE_MAX: usize = 64;

/// A connection pool of one thread. Clones share it.
#[derive(Clone)]
pub struct Client {
    pool: Rc<Pool>,
    connector: Connector,
}

#[derive(Default)]
struct Pool {
    idle: RefCell<HashMap<String, Vec<Idle>>>,
}

struct Idle {
    stream: Stream,
    since: Instant,
}

/// A request, the same for every worker it may go to.
#[derive(Debug, Clone)]
pub struct Request {
    path: String,
    headers: Vec<u8>,
    body: Bytes,
}

impl Request {
    /// A POST of `body` to `path` (with its query) under a worker's base URL.
    pub fn post(path: impl Into<String>, body: Bytes) -> Self {
        Self { path: path.into(), headers: Vec::new(), body }
    }

    /// The API it speaks, by its path.
    pub fn api(&self) -> Api {
        Api::from_path(&self.path).unwrap_or(Api::Chat)
    }

    /// Its body.
    pub fn body(&self) -> &Bytes {
        &self.body
    }

    /// The same request with another body.
    #[must_use]
    pub fn with_body(&self, body: Bytes) -> Self {
        Self { body, ..self.clone() }
    }

    /// Adds a header. Host and Content-Length are added on sending.
    pub fn header(&mut self, name: &HeaderName, value: &HeaderValue) {
        push_header(&mut self.headers, name.as_str(), value.as_bytes());
    }
}

fn push_header(out: &mut Vec<u8>, name: &str, value: &[u8]) {
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(b": ");
    out.extend_from_slice(value);
    out.extend_from_slice(b"\r\n");
}

/// The head of a response and its body to come.
#[derive(Debug)]
pub struct Response {
    /// Its status, 2xx to 5xx.
    pub status: StatusCode,
    /// Its headers, in order, hop-by-hop ones included.
    pub headers: Vec<(HeaderName, HeaderValue)>,
    /// Its body.
    pub body: Body,
}

/// Why there is no response.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// Nothing was sent: no connection.
    #[error("no connection")]
    Connect,
    /// The connection ended before a whole response head.
    #[error("closed before its answer")]
    Closed,
    /// What came is not HTTP/1.1.
    #[error("malformed answer: {0}")]
    Malformed(&'static str),
}

impl Client {
    /// An empty pool.
    pub fn new(connector: Connector) -> Self {
        Self { pool: Rc::default(), connector }
    }

    /// Whether workers are shown a key of the gateway's own.
    pub fn shows_key(&self) -> bool {
        self.connector.key().is_some()
    }

    /// Sends `request` with `extra` headers to the worker at `base` (`http[s]://host[:port][/prefix]`) and waits
    /// for the response's head. Dropping the future closes the connection.
    ///
    /// # Errors
    /// See [`SendError`]. A request is never sent twice.
    pub async fn send(
        &self,
        base: &str,
        request: &Request,
        extra: &[(&str, &[u8])],
    ) -> Result<Response, SendError> {
        let (scheme, rest) = base.split_once("://").ok_or(SendError::Connect)?;
        let (authority, prefix) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        let origin = &base[..scheme.len() + 3 + authority.len()];
        let mut stream = match self.pool.take(origin) {
            Some(stream) => stream,
            None => self.connector.connect(scheme == "https", authority).await?,
        };
        let head = request_head(request, authority, prefix, extra, self.connector.key());
        let mut buf = BytesMut::with_capacity(8 << 10);
        let (head, sent) = exchange(&mut stream, &head, request.body.clone(), &mut buf).await?;
        let ResponseHead { status, headers, framing, keep_alive } = head;
        let home = (sent && keep_alive).then(|| (Rc::downgrade(&self.pool), origin.to_owned()));
        Ok(Response { status, headers, body: Body::new(stream, buf, framing, home) })
    }
}

impl Pool {
    fn take(&self, origin: &str) -> Option<Stream> {
        let mut idle = self.idle.borrow_mut();
        let list = idle.get_mut(origin)?;
        while let Some(Idle { mut stream, since }) = list.pop() {
            if stream.is_quiet() && since.elapsed() < IDLE {
                return Some(stream);
            }
        }
        None
    }

    fn put(&self, origin: String, stream: Stream) {
        let mut idle = self.idle.borrow_mut();
        let list = idle.entry(origin).or_default();
        list.retain(|i| i.since.elapsed() < IDLE);
        if list.len() < IDLE_MAX {
            list.push(Idle { stream, since: Instant::now() });
        }
    }
}

fn request_head(
    request: &Request,
    authority: &str,
    prefix: &str,
    extra: &[(&str, &[u8])],
    key: Option<&str>,
) -> Vec<u8> {
    let mut head = Vec::with_capacity(256 + request.headers.len());
    for part in ["POST ", prefix, &request.path, " HTTP/1.1\r\nhost: ", authority, "\r\n"] {
        head.extend_from_slice(part.as_bytes());
    }
    head.extend_from_slice(&request.headers);
    for (name, value) in extra {
        push_header(&mut head, name, value);
    }
    if let Some(key) = key {
        push_header(&mut head, "authorization", format!("Bearer {key}").as_bytes());
    }
    push_header(&mut head, "content-length", request.body.len().to_string().as_bytes());
    head.extend_from_slice(b"\r\n");
    head
}

/// Writes the request and reads the response's head, both at once: a worker may refuse a large body before
/// it has read it. Returns whether the request went out completely.
async fn exchange(
    stream: &mut Stream,
    head: &[u8],
    body: Bytes,
    buf: &mut BytesMut,
) -> Result<(ResponseHead, bool), SendError> {
    match stream {
        Stream::Plain(stream) => {
            let (rd, wr) = stream.split();
            both(rd, wr, head, body, buf).await
        }
        Stream::Tls(stream) => {
            let (rd, wr) = tokio::io::split(&mut **stream);
            both(rd, wr, head, body, buf).await
        }
    }
}

async fn both(
    mut rd: impl AsyncRead + Unpin,
    mut wr: impl AsyncWrite + Unpin,
    head: &[u8],
    body: Bytes,
    buf: &mut BytesMut,
) -> Result<(ResponseHead, bool), SendError> {
    let mut out = head.chain(body);
    let mut write = std::pin::pin!(async {
        wr.write_all_buf(&mut out).await?;
        wr.flush().await // TLS keeps what is no whole record yet
    });
    let mut read = std::pin::pin!(head::read(&mut rd, buf));
    tokio::select! {
        biased;
        written = &mut write => {
            // After a failed write the reason may still be readable.
            read.await.map(|head| (head, written.is_ok()))
        }
        head = &mut read => head.map(|head| (head, false)),
    }
}

#[cfg(test)]
mod tests;
