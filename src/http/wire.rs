//! A client's connection: plain or TLS. It also gives a body to the answers that the HTTP layer below gives by itself
//! (400, 408, 431: no handler ever sees those requests), so that they too are in the API's format.

use std::cell::Cell;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use actix_web::http::StatusCode;
use bytes::{Buf, Bytes};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::server::TlsStream;

use super::errors::ApiError;

/// See the module.
pub(super) struct Wire {
    stream: Stream,
    peer: Peer,
    /// An answer on its way out in place of `stands_for` bytes of the HTTP layer's.
    instead: Option<(Bytes, usize)>,
}

/// Whether the client has left, as its connection's requests may ask: below, a body that broke off with its connection
/// looks like one that is malformed.
#[derive(Debug, Clone, Default)]
pub(super) struct Peer(Rc<Cell<bool>>);

impl Peer {
    /// Whether it has.
    pub fn is_gone(&self) -> bool {
        self.0.get()
    }
}

enum Stream {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

impl Wire {
    pub fn plain(stream: TcpStream) -> Self {
        Self { stream: Stream::Plain(stream), peer: Peer::default(), instead: None }
    }

    pub fn tls(stream: TlsStream<TcpStream>) -> Self {
        Self { stream: Stream::Tls(Box::new(stream)), peer: Peer::default(), instead: None }
    }

    /// What its requests may ask.
    pub fn peer(&self) -> Peer {
        self.peer.clone()
    }
}

/// The answer that takes the place of a bare one.
fn instead_of(head: &[u8]) -> Option<Bytes> {
    let status = head.strip_prefix(b"HTTP/1.1 ").or_else(|| head.strip_prefix(b"HTTP/1.0 "))?.get(..3)?;
    let error = match status {
        b"400" => ApiError::bad_body("The request is not valid HTTP.", None),
        b"408" => ApiError::head_timeout(),
        b"431" => ApiError::head_too_large(),
        _ => return None,
    };
    // What handlers answer has a body or names its reason.
    let text = std::str::from_utf8(head).ok()?.to_ascii_lowercase();
    let bare = text.contains("\r\ncontent-length: 0\r\n") && !text.contains("\r\nx-kvc-");
    if !bare || text.find("\r\n\r\n")? + 4 != text.len() {
        return None;
    }
    let body = error.body();
    let reason = error.status.canonical_reason().unwrap_or_default();
    let answer = format!(
        "HTTP/1.1 {} {reason}\r\ncontent-type: application/json\r\ncontent-length: {}\r\nx-kvc-mode: failed\r\n\
         x-kvc-reason: {}\r\nconnection: close\r\n\r\n{body}",
        error.status.as_u16(),
        body.len(),
        error.code
    );
    Some(answer.into())
}

impl ApiError {
    fn head_timeout() -> Self {
        let message = "The request did not arrive in time.";
        Self::new(StatusCode::REQUEST_TIMEOUT, "request_timeout", message)
    }

    fn head_too_large() -> Self {
        let message = "The request's head is larger than 128 KiB or has more than 96 headers.";
        Self::new(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE, "head_too_large", message)
    }
}

impl AsyncRead for Wire {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let read = ready!(match &mut self.stream {
            Stream::Plain(stream) => Pin::new(stream).poll_read(cx, buf),
            Stream::Tls(stream) => Pin::new(stream).poll_read(cx, buf),
        });
        if read.is_err() || (buf.filled().len() == before && buf.remaining() > 0) {
            self.peer.0.set(true);
        }
        Poll::Ready(read)
    }
}

impl AsyncWrite for Wire {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let this = &mut *self;
        if this.instead.is_none() {
            this.instead = instead_of(buf).map(|answer| (answer, buf.len()));
        }
        while let Some((answer, stands_for)) = &mut this.instead {
            if answer.is_empty() {
                let written = *stands_for;
                this.instead = None;
                return Poll::Ready(Ok(written));
            }
            let written = ready!(this.stream.poll_write(cx, answer))?;
            if written == 0 {
                return Poll::Ready(Ok(0));
            }
            answer.advance(written);
        }
        this.stream.poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.stream {
            Stream::Plain(stream) => Pin::new(stream).poll_flush(cx),
            Stream::Tls(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.stream {
            Stream::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            Stream::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}

impl Stream {
    fn poll_write(&mut self, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        match self {
            Self::Plain(stream) => Pin::new(stream).poll_write(cx, buf),
            Self::Tls(stream) => Pin::new(stream).poll_write(cx, buf),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_bare_answers_of_the_layer_below_get_a_body() {
        let bare = "HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\ndate: x\r\n\r\n";
        let answer = String::from_utf8(instead_of(bare.as_bytes()).unwrap().to_vec()).unwrap();
        assert!(answer.starts_with("HTTP/1.1 408 Request Timeout\r\n"), "{answer}");
        assert!(answer.contains(r#""code":"request_timeout""#) && answer.contains("connection: close"));
        for other in [
            bare.replace("408", "200"),
            bare.replace("0\r\n", "2\r\n") + "{}",
            bare.replace("date", "x-kvc-reason"),
            bare.to_owned() + "HTTP/1.1 200 OK\r\n\r\n",
            "data: 400".into(),
        ] {
            assert_eq!(instead_of(other.as_bytes()), None, "{other}");
        }
    }
}
