//! Frames of a KV connection: `u32 magic | u8 version | u8 kind | u16 zero | u32 payload length | payload |
//! u64 xxh3 of all before`, numbers little-endian. The checksum is of the crate that finds AVX2 at run time: on large
//! frames it is several times as fast as the one that hashes prompts, which is better on short pieces.

use std::hash::Hasher as _;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use twox_hash::XxHash3_64;

/// Marks every frame.
pub const MAGIC: [u8; 4] = *b"KVCT";
/// Version of the frame format.
pub const VERSION: u8 = 2;
/// Bytes before the payload.
pub const HEADER: usize = 12;
/// Bytes behind it: the checksum. It comes last so that both sides can sum what they have at hand for the socket.
pub const TRAILER: usize = 8;
/// Longest payload either side accepts, in bytes: a block of 24 tokens at 96 KiB a token fits.
pub const MAX_PAYLOAD: usize = 4 << 20;

/// Bytes read at a time.
const PIECE: usize = 256 << 10;

/// What a frame is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// Sender → receiver, first: what it would send (JSON).
    Hello = 1,
    /// Receiver → sender: agreed (JSON).
    Welcome = 2,
    /// Sender → receiver: a transfer starts (JSON).
    Begin = 3,
    /// Sender → receiver: blocks (binary).
    Blocks = 4,
    /// Sender → receiver: that was all of the transfer.
    End = 5,
    /// Receiver → sender: everything is stored.
    Ack = 6,
    /// Receiver → sender: it will not be taken (JSON with the reason). The connection ends.
    Refuse = 7,
    /// D → P: blocks it would push (binary).
    Offer = 8,
    /// P → D: which of them it lacks (binary).
    Want = 9,
}

impl Kind {
    fn of(byte: u8) -> Option<Self> {
        use Kind::{Ack, Begin, Blocks, End, Hello, Offer, Refuse, Want, Welcome};
        [Hello, Welcome, Begin, Blocks, End, Ack, Refuse, Offer, Want]
            .into_iter()
            .find(|kind| *kind as u8 == byte)
    }
}

/// A frame that was read and checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// What it is.
    pub kind: Kind,
    /// Its content.
    pub payload: Bytes,
}

/// Why a frame could not be read.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// The other side closed between frames.
    #[error("the other side closed the connection")]
    Closed,
    /// The other side closed within a frame.
    #[error("the connection ended within a frame")]
    Truncated,
    /// Not our protocol.
    #[error("not a KV frame")]
    Magic,
    /// Another version of the format.
    #[error("frame version {0}, this side speaks {VERSION}")]
    Version(u8),
    /// A kind this side does not know.
    #[error("unknown frame kind {0}")]
    Kind(u8),
    /// Longer than [`MAX_PAYLOAD`].
    #[error("frame of {0} bytes, at most {MAX_PAYLOAD} are allowed")]
    TooLong(usize),
    /// The bytes are not those that were sent.
    #[error("frame checksum is wrong")]
    Checksum,
    /// The connection failed.
    #[error("connection: {0}")]
    Io(std::io::Error),
}

/// A frame in the making: its payload is written behind the header.
#[derive(Debug)]
pub struct Draft(Vec<u8>);

impl Draft {
    /// An empty frame.
    pub fn new(kind: Kind, capacity: usize) -> Self {
        let mut bytes = Vec::with_capacity(HEADER + capacity + TRAILER);
        bytes.extend_from_slice(&header(kind, 0));
        Self(bytes)
    }

    /// Appends to the payload.
    pub fn put(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    /// The frame's bytes, length and checksum filled in.
    pub fn finish(mut self) -> Vec<u8> {
        let len = (self.0.len() - HEADER) as u32;
        self.0[8..12].copy_from_slice(&len.to_le_bytes());
        let sum = XxHash3_64::oneshot(&self.0);
        self.0.extend_from_slice(&sum.to_le_bytes());
        self.0
    }
}

/// A whole frame with this payload.
pub fn frame(kind: Kind, payload: &[u8]) -> Vec<u8> {
    let mut draft = Draft::new(kind, payload.len());
    draft.put(payload);
    draft.finish()
}

fn header(kind: Kind, payload: u32) -> [u8; HEADER] {
    let mut head = [0; HEADER];
    head[..4].copy_from_slice(&MAGIC);
    head[4..8].copy_from_slice(&[VERSION, kind as u8, 0, 0]);
    head[8..].copy_from_slice(&payload.to_le_bytes());
    head
}

/// Writes one frame.
///
/// # Errors
/// The connection's.
pub async fn write(to: &mut (impl AsyncWrite + Unpin), frame: &[u8]) -> Result<(), FrameError> {
    to.write_all(frame).await.map_err(FrameError::Io)
}

/// Writes a frame whose payload ends with `tail`, which is not copied.
///
/// # Errors
/// The connection's.
pub async fn write_with(
    to: &mut (impl AsyncWrite + Unpin),
    kind: Kind,
    front: &[u8],
    tail: &[u8],
) -> Result<(), FrameError> {
    let head = [&header(kind, (front.len() + tail.len()) as u32), front].concat();
    let mut sum = XxHash3_64::new();
    sum.write(&head);
    let (mut before, mut left) = (&head[..], tail);
    loop {
        // Summed piece by piece, each just before it is copied to the socket.
        let (piece, rest) = left.split_at(left.len().min(PIECE));
        sum.write(piece);
        let end = if rest.is_empty() { sum.finish().to_le_bytes().to_vec() } else { Vec::new() };
        let mut piece = Buf::chain(Buf::chain(before, piece), &end[..]);
        to.write_all_buf(&mut piece).await.map_err(FrameError::Io)?;
        if rest.is_empty() {
            return Ok(());
        }
        (before, left) = (&[], rest);
    }
}

/// Reads one frame. Not cancel-safe: a dropped read leaves the connection useless.
///
/// # Errors
/// [`FrameError`]; nothing is allocated for a frame that announces too much.
pub async fn read(from: &mut (impl AsyncRead + Unpin)) -> Result<Frame, FrameError> {
    let mut head = [0u8; HEADER];
    let first = from.read(&mut head).await.map_err(FrameError::Io)?;
    if first == 0 {
        return Err(FrameError::Closed);
    }
    from.read_exact(&mut head[first..]).await.map_err(cut)?;
    let [m0, m1, m2, m3, version, kind, _, _, l0, l1, l2, l3] = head;
    if [m0, m1, m2, m3] != MAGIC {
        return Err(FrameError::Magic);
    }
    if version != VERSION {
        return Err(FrameError::Version(version));
    }
    let len = u32::from_le_bytes([l0, l1, l2, l3]) as usize;
    if len > MAX_PAYLOAD {
        return Err(FrameError::TooLong(len));
    }
    let whole = len + TRAILER;
    let mut payload = BytesMut::with_capacity(whole);
    let mut seen = XxHash3_64::new();
    seen.write(&head);
    while payload.len() < whole {
        // Summed piece by piece, while a piece is in the processor's cache.
        let (before, room) = (payload.len(), (whole - payload.len()).min(PIECE));
        let read = from.read_buf(&mut (&mut payload).limit(room)).await.map_err(cut)?;
        if read == 0 {
            return Err(FrameError::Truncated);
        }
        seen.write(&payload[before.min(len)..payload.len().min(len)]);
    }
    if payload.split_off(len) != seen.finish().to_le_bytes()[..] && !planted!(TransferUnchecked) {
        return Err(FrameError::Checksum);
    }
    let kind = Kind::of(kind).ok_or(FrameError::Kind(kind))?;
    Ok(Frame { kind, payload: payload.freeze() })
}

fn cut(error: std::io::Error) -> FrameError {
    match error.kind() {
        std::io::ErrorKind::UnexpectedEof => FrameError::Truncated,
        _ => FrameError::Io(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn round_trip_and_end() {
        let bytes = [frame(Kind::Blocks, b"abc"), frame(Kind::End, b"")].concat();
        let mut from = &bytes[..];
        assert_eq!(read(&mut from).await.unwrap(), Frame { kind: Kind::Blocks, payload: "abc".into() });
        assert_eq!(read(&mut from).await.unwrap().kind, Kind::End);
        assert!(matches!(read(&mut from).await, Err(FrameError::Closed)));
    }

    /// Any single flipped bit and any cut is noticed.
    #[tokio::test]
    async fn damage_is_noticed() {
        let good = frame(Kind::Blocks, b"some kv bytes");
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 0x10;
            assert!(read(&mut &bad[..]).await.is_err(), "flip at {at}");
            let cut = read(&mut &good[..at]).await;
            assert!(matches!(cut, Err(FrameError::Truncated | FrameError::Closed)), "cut at {at}");
        }
    }

    /// A frame written in pieces is the frame in one piece.
    #[tokio::test]
    async fn pieces_make_the_same_frame() {
        for tail in [0, 1, PIECE, 2 * PIECE + 5] {
            let kv = vec![7; tail];
            let mut written = Vec::new();
            write_with(&mut written, Kind::Blocks, b"front", &kv).await.unwrap();
            assert_eq!(written, frame(Kind::Blocks, &[b"front", &kv[..]].concat()));
            assert_eq!(read(&mut &written[..]).await.unwrap().payload.len(), 5 + tail);
        }
    }

    #[tokio::test]
    async fn an_oversized_frame_is_refused_by_its_header() {
        let mut bad = frame(Kind::Blocks, b"");
        bad[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(matches!(read(&mut &bad[..]).await, Err(FrameError::TooLong(_))));
    }
}
