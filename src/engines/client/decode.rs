//! Where a body ends: by length, by chunks, by the end of the connection.

use bytes::{Buf, Bytes, BytesMut};

/// Longest line of chunk framing in bytes.
const LINE_MAX: usize = 4 << 10;

/// State of a body's framing.
#[derive(Debug)]
pub(super) enum Framing {
    /// Bytes still to come.
    Length(u64),
    /// Chunked.
    Chunked(Chunk),
    /// Until the connection ends.
    Close,
}

#[derive(Debug)]
pub(super) enum Chunk {
    /// A size line comes next.
    Size,
    /// Bytes of this chunk still to come.
    Data(u64),
    /// The line end after a chunk.
    End,
    /// Trailer lines after the last chunk.
    Trailer,
}

/// What the buffered bytes yield.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Bytes of the body.
    Data(Bytes),
    /// The body is complete.
    Done,
    /// More bytes are needed.
    More,
}

impl Framing {
    pub fn chunked() -> Self {
        Self::Chunked(Chunk::Size)
    }

    /// Takes what it can from the front of `buf`.
    pub fn step(&mut self, buf: &mut BytesMut) -> Result<Step, &'static str> {
        match self {
            Self::Length(0) => Ok(Step::Done),
            Self::Length(left) => Ok(take(left, buf)),
            Self::Close if buf.is_empty() => Ok(Step::More),
            Self::Close => Ok(Step::Data(buf.split().freeze())),
            Self::Chunked(chunk) => chunk.step(buf),
        }
    }
}

impl Chunk {
    fn step(&mut self, buf: &mut BytesMut) -> Result<Step, &'static str> {
        loop {
            *self = match self {
                Self::Data(0) => Self::End,
                Self::Data(left) => return Ok(take(left, buf)),
                Self::Size => match line(buf)? {
                    None => return Ok(Step::More),
                    Some(line) => match size(&line)? {
                        0 => Self::Trailer,
                        size => Self::Data(size),
                    },
                },
                Self::End => match line(buf)? {
                    None => return Ok(Step::More),
                    Some(line) if line.is_empty() => Self::Size,
                    Some(_) => return Err("chunk longer than its size"),
                },
                Self::Trailer => match line(buf)? {
                    None => return Ok(Step::More),
                    Some(line) if line.is_empty() => return Ok(Step::Done),
                    Some(_) => Self::Trailer,
                },
            }
        }
    }
}

fn take(left: &mut u64, buf: &mut BytesMut) -> Step {
    if buf.is_empty() {
        return Step::More;
    }
    let len = buf.len().min(usize::try_from(*left).unwrap_or(usize::MAX));
    *left -= len as u64;
    Step::Data(buf.split_to(len).freeze())
}

/// The next line without its CRLF.
fn line(buf: &mut BytesMut) -> Result<Option<BytesMut>, &'static str> {
    let Some(end) = memchr::memchr(b'\n', &buf[..buf.len().min(LINE_MAX)]) else {
        return if buf.len() < LINE_MAX { Ok(None) } else { Err("chunk line too long") };
    };
    let mut line = buf.split_to(end);
    buf.advance(1);
    match line.last() {
        Some(b'\r') => line.truncate(end - 1),
        _ => return Err("chunk line without CR"),
    }
    Ok(Some(line))
}

fn size(line: &[u8]) -> Result<u64, &'static str> {
    let digits = line.split(|&b| b == b';').next().unwrap_or_default();
    let digits = std::str::from_utf8(digits).map(str::trim).unwrap_or_default();
    let hex = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_hexdigit());
    hex.then(|| u64::from_str_radix(digits, 16).ok()).flatten().ok_or("chunk size")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(framing: fn() -> Framing, wire: &[u8], step: usize) -> Result<(Vec<u8>, bool), &'static str> {
        let (mut framing, mut buf, mut out) = (framing(), BytesMut::new(), Vec::new());
        for piece in wire.chunks(step) {
            buf.extend_from_slice(piece);
            loop {
                match framing.step(&mut buf)? {
                    Step::Data(data) => out.extend_from_slice(&data),
                    Step::Done => return Ok((out, true)),
                    Step::More => break,
                }
            }
        }
        Ok((out, false))
    }

    #[test]
    fn chunks_survive_any_split() {
        let wire = b"5\r\nhello\r\n1;x=y\r\n \r\n00A \r\n0123456789\r\n0\r\nt: 1\r\n\r\n";
        for step in 1..=wire.len() {
            assert_eq!(run(Framing::chunked, wire, step), Ok((b"hello 0123456789".to_vec(), true)));
        }
        for cut in 0..wire.len() {
            assert!(!run(Framing::chunked, &wire[..cut], 3).unwrap().1, "cut at {cut} is no end");
        }
    }

    #[test]
    fn bad_chunks_are_errors() {
        for wire in ["x\r\n", "\r\n", "-1\r\n", "+1\r\n", "5\n", "1\r\nab\r\n", "11111111111111111\r\n"] {
            assert!(run(Framing::chunked, wire.as_bytes(), 1).is_err(), "{wire:?}");
        }
        assert!(run(Framing::chunked, &[b'0'; LINE_MAX], 7).is_err());
    }

    #[test]
    fn a_length_ends_exactly() {
        for step in 1..6 {
            assert_eq!(run(|| Framing::Length(3), b"abcdef", step), Ok((b"abc".to_vec(), true)));
        }
        assert_eq!(run(|| Framing::Length(3), b"ab", 1), Ok((b"ab".to_vec(), false)));
    }
}
