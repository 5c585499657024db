//! The inner loop of reading JSON strings: how far a plain run goes.

const LOW: u64 = 0x0101_0101_0101_0101;
const HIGH: u64 = 0x8080_8080_8080_8080;

/// The index of the first quote, backslash or control byte; the length when there is none.
#[inline]
pub(crate) fn special(bytes: &[u8]) -> usize {
    let (words, rest) = bytes.as_chunks::<8>();
    for (i, word) in words.iter().enumerate() {
        let hits = hits(u64::from_le_bytes(*word));
        if hits != 0 {
            return i * 8 + hits.trailing_zeros() as usize / 8;
        }
    }
    let tail = rest.iter().position(|&b| matches!(b, b'"' | b'\\' | 0..0x20));
    words.len() * 8 + tail.unwrap_or(rest.len())
}

/// The high bit of every byte that is a quote, a backslash or below 0x20. Borrows may set a bit too
/// many, but only above a true one, so the lowest set bit is exact.
#[inline]
const fn hits(word: u64) -> u64 {
    let quote = word ^ (LOW * b'"' as u64);
    let slash = word ^ (LOW * b'\\' as u64);
    (quote.wrapping_sub(LOW) & !quote
        | slash.wrapping_sub(LOW) & !slash
        | word.wrapping_sub(LOW * 0x20) & !word)
        & HIGH
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
    }
}
