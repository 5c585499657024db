//! The inner loops of reading JSON strings: sixteen bytes at a time, escapes in passing.

use wide::u8x16;

/// Bytes looked at together.
const LANES: usize = 16;
/// Output is made room for in steps of this; the bytes looked at are always written whole.
const WINDOW: usize = 4096;

/// What each escape's letter stands for; 0 for `u` and for what is no escape.
const PLAIN: [u8; 256] = {
    let mut table = [0; 256];
    table[b'"' as usize] = b'"';
    table[b'\\' as usize] = b'\\';
    table[b'/' as usize] = b'/';
    table[b'n' as usize] = b'\n';
    table[b't' as usize] = b'\t';
    table[b'r' as usize] = b'\r';
    table[b'b' as usize] = 8;
    table[b'f' as usize] = 12;
    table
};

/// A string's text from `at` (after the opening quote) to its closing quote: the quote's index, and whether
/// there are escapes. An error gives the index of what is wrong.
pub(crate) fn skip(text: &[u8], mut at: usize) -> Result<(usize, bool), usize> {
    let mut escaped = false;
    loop {
        at += special(text.get(at..).unwrap_or_default());
        match text.get(at) {
            Some(b'"') => return Ok((at, escaped)),
            Some(b'\\') => at = escape(text, at)?.1,
            _ => return Err(at),
        }
        escaped = true;
    }
}

/// Decodes a string's text from `at` on and appends it to `out`. It ends at the closing quote, or where `text`
/// does when it has none (`quoted` is false). Gives the index of that end.
pub(crate) fn decode(text: &[u8], mut at: usize, out: &mut Vec<u8>, quoted: bool) -> Result<usize, usize> {
    let mut len = out.len();
    let end = loop {
        if out.len() < len + LANES {
            out.resize(len + WINDOW, 0);
        }
        if let Some(lanes) = text.get(at..).and_then(|rest| rest.first_chunk::<LANES>()) {
            out[len..len + LANES].copy_from_slice(lanes);
            let plain = first_hit(*lanes);
            (at, len) = (at + plain, len + plain);
            if plain == LANES {
                continue;
            }
        }
        match text.get(at) {
            Some(b'\\') => {
                let letter = text.get(at + 1).copied().unwrap_or(0);
                out[len] = PLAIN[usize::from(letter)];
                if out[len] != 0 {
                    (at, len) = (at + 2, len + 1);
                    continue;
                }
                out.truncate(len);
                at = unicode(text, at, out)?;
                len = out.len();
            }
            Some(b'"') if quoted => break Ok(at),
            Some(b'"' | 0..0x20) => break Err(at),
            Some(&byte) => {
                out[len] = byte;
                (at, len) = (at + 1, len + 1);
            }
            None if quoted => break Err(at),
            None => break Ok(at),
        }
    };
    out.truncate(len);
    end
}

/// Reads the escape at `at`: what it stands for (`None` for a lone surrogate's number) and where it ends.
fn escape(text: &[u8], at: usize) -> Result<(u32, usize), usize> {
    let letter = text.get(at + 1).copied().unwrap_or(0);
    match PLAIN[usize::from(letter)] {
        0 if letter == b'u' => point(text, at),
        0 => Err(at),
        plain => Ok((plain.into(), at + 2)),
    }
}

fn unicode(text: &[u8], at: usize, out: &mut Vec<u8>) -> Result<usize, usize> {
    let (point, end) = escape(text, at)?;
    match char::from_u32(point) {
        Some(c) => out.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes()),
        // A lone surrogate keeps its own three bytes: it equals nothing else.
        None => out.extend_from_slice(&[
            0xE0 | (point >> 12) as u8,
            0x80 | (point >> 6 & 0x3F) as u8,
            0x80 | (point & 0x3F) as u8,
        ]),
    }
    Ok(end)
}

/// The code point of `\uXXXX`, or of two that are a surrogate pair.
fn point(text: &[u8], at: usize) -> Result<(u32, usize), usize> {
    let high = hex(text, at)?;
    if (0xD800..0xDC00).contains(&high)
        && text.get(at + 6..at + 8) == Some(b"\\u")
        && let low @ 0xDC00..=0xDFFF = hex(text, at + 6)?
    {
        return Ok((0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00), at + 12));
    }
    Ok((high, at + 6))
}

/// The four digits of the `\u` escape at `at`.
fn hex(text: &[u8], at: usize) -> Result<u32, usize> {
    let digits = text.get(at + 2..at + 6).ok_or(at)?;
    let digit = |v, &d: &u8| Some(v << 4 | (d as char).to_digit(16)?);
    digits.iter().try_fold(0, digit).ok_or(at)
}

/// The index of the first quote, backslash or control byte; the length when there is none.
#[inline]
fn special(bytes: &[u8]) -> usize {
    let (chunks, rest) = bytes.as_chunks::<LANES>();
    for (i, chunk) in chunks.iter().enumerate() {
        let plain = first_hit(*chunk);
        if plain < LANES {
            return i * LANES + plain;
        }
    }
    let tail = rest.iter().position(|&b| matches!(b, b'"' | b'\\' | 0..0x20));
    chunks.len() * LANES + tail.unwrap_or(rest.len())
}

/// How many bytes stand before the first quote, backslash or control byte.
#[inline]
fn first_hit(bytes: [u8; LANES]) -> usize {
    let lanes = u8x16::new(bytes);
    let low = lanes.min(u8x16::splat(0x1F)).simd_eq(lanes);
    let hits = lanes.simd_eq(u8x16::splat(b'"')) | lanes.simd_eq(u8x16::splat(b'\\')) | low;
    (hits.to_bitmask() | 1 << LANES).trailing_zeros() as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn same_as_the_plain_loop(bytes in proptest::collection::vec(prop_oneof![9 => 0x20u8..=255, 1 => any::<u8>()], 0..70)) {
            let plain = bytes.iter().position(|&b| matches!(b, b'"' | b'\\' | 0..0x20)).unwrap_or(bytes.len());
            prop_assert_eq!(special(&bytes), plain);
        }

        #[test]
        fn skip_and_decode_agree(text in r#"[a-z\\"un0-9D8é]{0,60}"#) {
            let mut out = Vec::new();
            let decoded = decode(text.as_bytes(), 0, &mut out, true);
            prop_assert_eq!(decoded, skip(text.as_bytes(), 0).map(|(end, _)| end));
        }
    }
}
