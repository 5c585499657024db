//! Ids of tool calls: which of them name one call of one conversation.

use xxhash_rust::xxh3::xxh3_64;

/// The digest of a tool-call id that is unique by its looks; `None` for those that models and templates number
/// (`functions.x:0`, `call_1`): they name a call of every conversation.
pub fn call_id(id: &[u8]) -> Option<u64> {
    if id.is_empty() || id.len() > 256 || id.starts_with(b"functions.") {
        return None;
    }
    let random = |word: &[u8]| {
        let digit = word.iter().any(u8::is_ascii_digit);
        let mixed = word.iter().any(u8::is_ascii_lowercase) && word.iter().any(u8::is_ascii_uppercase);
        (word.len() >= 8 && digit) || (word.len() >= 9 && mixed)
    };
    id.split(|b| !b.is_ascii_alphanumeric()).any(random).then(|| xxh3_64(id))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unique_by_looks() {
        for id in [
            "call_aaaaaaaa1",
            "toolu_01A09q90qw90lq917835lq9",
            "chatcmpl-tool-8f14e45fceea167a5a36dedd4bea2543",
            "D681PevKs",
            "0f2e7a54-1111-4222-8333-abcdefabcdef",
        ] {
            assert!(call_id(id.as_bytes()).is_some(), "{id}");
        }
        for id in ["", "functions.x:0", "functions.readFileNow9:12", "call_1", "0", "read_file-3", "call"] {
            assert!(call_id(id.as_bytes()).is_none(), "{id}");
        }
    }
}
