//! Response heads.

use actix_web::http::StatusCode;
use actix_web::http::header::{self, HeaderName, HeaderValue};
use bytes::{Buf, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt};

use super::SendError;
use super::decode::Framing;

/// Largest response head in bytes.
const HEAD_MAX: usize = 64 << 10;
/// Most headers of a response.
const HEADERS_MAX: usize = 100;

/// A parsed head.
pub(super) struct ResponseHead {
    pub status: StatusCode,
    pub headers: Vec<(HeaderName, HeaderValue)>,
    pub framing: Framing,
    pub keep_alive: bool,
}

/// Reads until a final head is complete; what follows it stays in `buf`.
pub(super) async fn read(
    io: &mut (impl AsyncRead + Unpin),
    buf: &mut BytesMut,
) -> Result<ResponseHead, SendError> {
    loop {
        while let Some((head, len)) = parse(buf)? {
            buf.advance(len);
            if let Some(head) = head {
                return Ok(head);
            }
        }
        if buf.len() > HEAD_MAX {
            return Err(SendError::Malformed("head too large"));
        }
        buf.reserve(4 << 10);
        match io.read_buf(buf).await {
            Ok(0) | Err(_) => return Err(SendError::Closed),
            Ok(_) => {}
        }
    }
}

/// A complete head and its length; no head for an interim (1xx) one.
type Parsed = Option<(Option<ResponseHead>, usize)>;

fn parse(buf: &[u8]) -> Result<Parsed, SendError> {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut response = httparse::Response::new(&mut headers);
    let len = match response.parse(buf) {
        Ok(httparse::Status::Complete(len)) => len,
        Ok(httparse::Status::Partial) => return Ok(None),
        Err(_) => return Err(SendError::Malformed("head")),
    };
    let status = response.code.and_then(|code| StatusCode::from_u16(code).ok());
    let status = status.ok_or(SendError::Malformed("status"))?;
    if status == StatusCode::SWITCHING_PROTOCOLS {
        return Err(SendError::Malformed("unasked upgrade"));
    }
    if status.is_informational() {
        return Ok(Some((None, len)));
    }
    let headers = response
        .headers
        .iter()
        .map(|h| {
            Some((HeaderName::from_bytes(h.name.as_bytes()).ok()?, HeaderValue::from_bytes(h.value).ok()?))
        })
        .collect::<Option<Vec<_>>>()
        .ok_or(SendError::Malformed("header"))?;
    let framing = framing(status, &headers)?;
    let keep_alive = response.version == Some(1)
        && !matches!(framing, Framing::Close)
        && !has_token(&headers, &header::CONNECTION, "close");
    Ok(Some((Some(ResponseHead { status, headers, framing, keep_alive }), len)))
}

/// RFC 9112, 6.3.
fn framing(status: StatusCode, headers: &[(HeaderName, HeaderValue)]) -> Result<Framing, SendError> {
    if matches!(status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED) {
        return Ok(Framing::Length(0));
    }
    if headers.iter().any(|(name, _)| name == header::TRANSFER_ENCODING) {
        return match has_token(headers, &header::TRANSFER_ENCODING, "chunked") {
            true => Ok(Framing::chunked()),
            false => Err(SendError::Malformed("transfer encoding")),
        };
    }
    let mut lengths = headers.iter().filter(|(name, _)| name == header::CONTENT_LENGTH);
    let Some((_, first)) = lengths.next() else { return Ok(Framing::Close) };
    let length = first.to_str().ok().filter(|s| s.bytes().all(|b| b.is_ascii_digit()));
    match length.and_then(|s| s.parse().ok()) {
        Some(length) if lengths.all(|(_, other)| other == first) => Ok(Framing::Length(length)),
        _ => Err(SendError::Malformed("content length")),
    }
}

fn has_token(headers: &[(HeaderName, HeaderValue)], name: &HeaderName, token: &str) -> bool {
    let values = headers.iter().filter(|(n, _)| n == name).filter_map(|(_, v)| v.to_str().ok());
    values.flat_map(|v| v.split(',')).any(|t| t.trim().eq_ignore_ascii_case(token))
}
