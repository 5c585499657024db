//! The inner loops of reading JSON strings: a mask of what is special in 64 bytes, then from one to the next.
//!
//! Text of code has an escape every 30 bytes or so, too few to predict and too many to search for one by one.
//! Runs are copied in whole blocks, what is too much is written over: no length is ever branched on.

use wide::u8x16;

/// Bytes looked at together.
const BLOCK: usize = 64;
/// A block, and a block more behind any place in it or an escape at its end.
const REACH: usize = 2 * BLOCK + 2;
/// Output is made room for in steps of this.
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
    // Keys and most values end here.
    if let Some(lanes) = text.get(at..).and_then(|rest| rest.first_chunk::<16>()) {
        let hit = special(lanes).trailing_zeros() as usize;
        if lanes.get(hit) == Some(&b'"') {
            return Ok((at + hit, false));
        }
    }
    let mut escaped = false;
    'blocks: loop {
        let Some(block) = text.get(at..).and_then(|rest| rest.first_chunk::<BLOCK>()) else {
            return skip_slowly(text, at, escaped);
        };
        let (mut hits, mut next) = (hits(block), BLOCK);
        while hits != 0 {
            let hit = hits.trailing_zeros() as usize;
            if block[hit] != b'\\' {
                return if block[hit] == b'"' { Ok((at + hit, escaped)) } else { Err(at + hit) };
            }
            escaped = true;
            let letter = text.get(at + hit + 1).copied().unwrap_or(0);
            if PLAIN[usize::from(letter)] == 0 {
                at = escape(text, at + hit)?.1;
                continue 'blocks;
            }
            hits &= !(3 << hit);
            next = next.max(hit + 2);
        }
        at += next;
    }
}

fn skip_slowly(text: &[u8], mut at: usize, mut escaped: bool) -> Result<(usize, bool), usize> {
    loop {
        match text.get(at) {
            Some(b'"') => return Ok((at, escaped)),
            Some(b'\\') => {
                at = escape(text, at)?.1;
                escaped = true;
            }
            None | Some(0..0x20) => return Err(at),
            Some(_) => at += 1,
        }
    }
}

/// Decodes a string's text from `at` on and appends it to `out`. It ends at the closing quote, or where `text`
/// does when it has none (`quoted` is false). Gives the index of that end.
pub(crate) fn decode(text: &[u8], mut at: usize, out: &mut Vec<u8>, quoted: bool) -> Result<usize, usize> {
    let mut len = out.len();
    'blocks: while let Some(reach) = text.get(at..).and_then(|rest| rest.first_chunk::<REACH>()) {
        if out.len() < len + 2 * BLOCK {
            out.resize(len + WINDOW, 0);
        }
        let (mut hits, mut from) = (hits(reach.first_chunk().unwrap_or(&[0; BLOCK])), 0);
        while hits != 0 {
            let hit = hits.trailing_zeros() as usize;
            out[len..len + BLOCK].copy_from_slice(&reach[from..from + BLOCK]);
            len += hit - from;
            let letter = usize::from(reach[hit + 1]);
            if reach[hit] != b'\\' || PLAIN[letter] == 0 {
                out.truncate(len);
                if reach[hit] != b'\\' {
                    return if quoted && reach[hit] == b'"' { Ok(at + hit) } else { Err(at + hit) };
                }
                at = unicode(text, at + hit, out)?;
                len = out.len();
                continue 'blocks;
            }
            out[len] = PLAIN[letter];
            len += 1;
            from = hit + 2;
            // The letter may be a quote or a backslash itself.
            hits &= !(3 << hit);
        }
        out[len..len + BLOCK].copy_from_slice(&reach[from..from + BLOCK]);
        len += BLOCK.saturating_sub(from);
        at += BLOCK.max(from);
    }
    out.truncate(len);
    decode_slowly(text, at, out, quoted)
}

fn decode_slowly(text: &[u8], mut at: usize, out: &mut Vec<u8>, quoted: bool) -> Result<usize, usize> {
    loop {
        match text.get(at) {
            Some(b'\\') => at = unicode(text, at, out)?,
            Some(b'"') if quoted => return Ok(at),
            None if !quoted => return Ok(at),
            None | Some(b'"' | 0..0x20) => return Err(at),
            Some(&byte) => {
                out.push(byte);
                at += 1;
            }
        }
    }
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

/// A bit for every quote, backslash and control byte.
#[inline]
fn hits(block: &[u8; BLOCK]) -> u64 {
    let (lanes, _) = block.as_chunks::<16>();
    lanes.iter().rev().fold(0, |mask, lanes| mask << 16 | u64::from(special(lanes)))
}

#[inline]
fn special(lanes: &[u8; 16]) -> u32 {
    let lanes = u8x16::new(*lanes);
    let low = lanes.min(u8x16::splat(0x1F)).simd_eq(lanes);
    (lanes.simd_eq(u8x16::splat(b'"')) | lanes.simd_eq(u8x16::splat(b'\\')) | low).to_bitmask()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn is_special(byte: u8) -> bool {
        matches!(byte, b'"' | b'\\' | 0..0x20)
    }

    proptest! {
        #[test]
        fn hits_are_the_special_bytes(block in proptest::collection::vec(prop_oneof![9 => 0x20u8..=255, 1 => any::<u8>()], BLOCK)) {
            let mask = hits(block.first_chunk().expect("a block"));
            for (i, &byte) in block.iter().enumerate() {
                prop_assert_eq!(mask >> i & 1 == 1, is_special(byte));
            }
        }

        /// The quick loops and the plain ones, and one with the other.
        #[test]
        fn all_loops_agree(text in r#"([a-z]{0,90}|\\["\\/nu]|\\u00e9|\\ud83d\\ude00|["\x01]?|é){0,12}"#, pad in 0usize..200) {
            let text = format!("{text}{}", "x".repeat(pad));
            let text = text.as_bytes();
            for quoted in [true, false] {
                let (mut quick, mut plain) = (vec![1], vec![1]);
                let ends = (decode(text, 0, &mut quick, quoted), decode_slowly(text, 0, &mut plain, quoted));
                prop_assert_eq!(ends.0, ends.1);
                prop_assert_eq!(quick, plain);
            }
            prop_assert_eq!(skip(text, 0), skip_slowly(text, 0, false));
            prop_assert_eq!(decode(text, 0, &mut Vec::new(), true), skip(text, 0).map(|(end, _)| end));
        }
    }
}
