//! The text that the character GPT reads: Kiln's documentation, as numbers of characters.

use std::path::Path;

use kiln::Result;
use kiln::prelude::*;

use crate::failure::Failure;

/// Our own pages.
const PAGES: &[&str] = &[
    include_str!("../../../../README.md"),
    include_str!("../../../../ARCHITECTURE.md"),
    include_str!("../../../../CONTRIBUTING.md"),
    include_str!("../../../../CHANGELOG.md"),
    include_str!("../../../../docs/tour.md"),
    include_str!("../../../../docs/compile.md"),
    include_str!("../../../../docs/from-pytorch.md"),
    include_str!("../../../../docs/training.md"),
    include_str!("../../../../docs/numerics.md"),
    include_str!("../../../../docs/benchmarks.md"),
    include_str!("../../../../docs/capture.md"),
    include_str!("../../../../docs/ops.md"),
];

/// One in so many characters is held out, from the end of each page.
const HELD_OUT: usize = 10;

/// Text as numbers, in a part to learn from and one to validate with.
pub struct Text {
    /// The characters there are, in order: a token is a place in it.
    pub characters: Vec<char>,
    /// To learn from.
    pub training: Vec<i64>,
    /// Held out.
    pub validation: Vec<i64>,
}

impl Text {
    /// Kiln's documentation, or a file.
    pub fn read(path: Option<&Path>) -> Result<Text, Failure> {
        match path {
            None => Ok(Text::of(PAGES)),
            Some(path) => match std::fs::read_to_string(path) {
                Ok(text) => Ok(Text::of(&[&text])),
                Err(error) => {
                    let path = path.display().to_string();
                    Err(Failure::Text { path, reason: error.to_string() })
                }
            },
        }
    }

    fn of(pages: &[&str]) -> Text {
        let mut characters: Vec<char> = pages.iter().flat_map(|page| page.chars()).collect();
        characters.sort_unstable();
        characters.dedup();
        let mut text = Text { characters, training: Vec::new(), validation: Vec::new() };
        for page in pages {
            let tokens: Vec<i64> = page.chars().filter_map(|c| text.token(c)).collect();
            let (learnt, held_out) = tokens.split_at(tokens.len() - tokens.len() / HELD_OUT);
            text.training.extend(learnt);
            text.validation.extend(held_out);
        }
        text
    }

    fn token(&self, character: char) -> Option<i64> {
        self.characters.binary_search(&character).ok().map(|at| at as i64)
    }

    /// The tokens of a text, or the first character that has none.
    pub fn encode(&self, text: &str) -> Result<Vec<i64>, char> {
        text.chars().map(|c| self.token(c).ok_or(c)).collect()
    }

    /// The text of tokens.
    pub fn decode(&self, tokens: &[i64]) -> String {
        tokens.iter().filter_map(|token| self.characters.get(usize::try_from(*token).ok()?)).collect()
    }
}

/// Every stretch of so many tokens in a text is a sample.
pub struct Windows {
    /// The text.
    pub tokens: Vec<i64>,
    /// How long a stretch is.
    pub length: usize,
}

impl Dataset for Windows {
    type Sample = Tensor;

    fn len(&self) -> usize {
        (self.tokens.len() + 1).saturating_sub(self.length)
    }

    fn get(&self, index: usize) -> Result<Tensor> {
        Tensor::from_slice(&self.tokens[index..index + self.length])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_split_and_reads_back() {
        let text = Text::of(&["abcabcabca", "hello über"]);
        assert_eq!(text.decode(&text.validation), "ar");
        assert_eq!(text.decode(&text.training), "abcabcabchello übe");
        assert_eq!(text.encode("café"), Err('f'));
        let windows = Windows { tokens: text.training, length: 4 };
        assert_eq!(windows.len(), 15);
        assert_eq!(windows.get(14).and_then(|tensor| tensor.to_vec::<i64>()).expect("the last").len(), 4);
    }

    #[test]
    fn the_documentation_is_long_enough() {
        let text = Text::read(None).expect("it is in the program");
        assert!(text.training.len() > 60_000 && text.validation.len() > 6_000);
        assert!(text.characters.len() < 200, "{}", text.characters.len());
    }
}
