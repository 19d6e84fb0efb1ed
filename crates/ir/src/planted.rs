//! Planted faults: compiler bugs on purpose, so that the tools that look for bugs can prove that they find them.
//!
//! Each is one `if planted(Fault::…)` in the pass that it spoils. They exist only with the feature `planted`, which tests
//! turn on: without it [`planted()`] is `false` for the compiler, and nothing of a fault is left in the program.
//!
//! ```
//! use kiln_ir::Fault;
//! let fault: Fault = "first-chunk-repeated".parse().expect("a fault's name");
//! assert_eq!((fault.stage(), fault.rule()), ("schedule", None));
//! assert!(!kiln_ir::planted(fault));
//! ```

/// How a fault comes to light.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub enum Shows {
    /// Results are wrong.
    Wrong,
    /// Results are wrong; with debug assertions a verifier refuses what the pass made.
    Caught,
    /// The pass panics.
    Panic,
    /// The C compiler refuses a kernel, and its ops run one by one.
    Refused,
    /// The process dies.
    Crash,
    /// A kernel never ends.
    Hang,
    /// Far more memory is needed.
    Memory,
    /// A graph ends where it need not.
    Break,
}

macro_rules! faults {
    ($( $stage:literal { $( $Variant:ident $name:literal $([$rule:literal])? $($shows:ident)?: $what:literal; )* } )*) => {
        /// A planted fault.
        #[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
        pub enum Fault {
            $($(#[doc = $what] $Variant,)*)*
        }

        impl Fault {
            /// All of them, in the order of the stages.
            pub const ALL: &'static [Fault] = &[$($(Fault::$Variant,)*)*];

            /// Its name, as `KILN_PLANT` takes it.
            pub const fn name(self) -> &'static str {
                match self { $($(Fault::$Variant => $name,)*)* }
            }

            /// The stage it is in.
            pub const fn stage(self) -> &'static str {
                match self { $($(Fault::$Variant => $stage,)*)* }
            }

            /// In stage `prims`: the rewrite rule it is in, or the pass beside the rules.
            pub const fn rule(self) -> Option<&'static str> {
                match self { $($(Fault::$Variant => faults!(@rule $($rule)?),)*)* }
            }

            /// How it comes to light.
            pub const fn shows(self) -> Shows {
                match self { $($(Fault::$Variant => faults!(@shows $($shows)?),)*)* }
            }

            /// What is wrong.
            pub const fn what(self) -> &'static str {
                match self { $($(Fault::$Variant => $what,)*)* }
            }
        }
    };
    (@rule) => { None };
    (@rule $rule:literal) => { Some($rule) };
    (@shows) => { Shows::Wrong };
    (@shows $shows:ident) => { Shows::$shows };
}

faults! {
    "capture" {
        NumbersKept "numbers-kept": "numbers of the first call serve all later ones";
        ChangeNotRecorded "change-not-recorded": "a `copy_` is checked, and then left out of what is compiled";
        GuardIgnoresStrides "guard-ignores-strides": "a recording serves inputs that lie differently in memory";
        BreakAtCumsum "break-at-cumsum" Break: "`cumsum` ends the graph, as if somebody had asked for its value";
    }
    "functionalise" {
        StaleView "stale-view": "a view that was read before is not made anew after its base was changed";
        WriteBackLost "write-back-lost": "an input that was changed through a view is not written back";
        ChangedRowBefore "changed-row-before": "what is put into a slice lands one row too early";
        GradientReplaced "gradient-replaced": "a second `backward()` replaces gradients instead of adding to them";
    }
    "joint" {
        TangentsSwapped "tangents-swapped": "the gradients of two results of the same type are exchanged";
        ThroughNoGrad "through-no-grad": "gradients flow through what ran under `no_grad`";
    }
    "partition" {
        SavedAfterWrite "saved-after-write": "a backward reads an input as the program left it, not as it was passed";
        ForwardForgetsWrite "forward-forgets-write": "the forward of a split graph leaves out its last write-back";
    }
    "prims" {
        FoldOffByOne "fold-off-by-one" ["fold"]: "a number that is worked out at compile time is one too small";
        SignLost "sign-lost" ["add_neg"]: "x + (−y) becomes x + y";
        WhereNotKeepsOrder "where-not-keeps-order" ["where_not"]: "where(not c, x, y) becomes where(c, x, y)";
        NarrowingDropped "narrowing-dropped" ["widen_first"]: "a conversion to a narrower dtype and back is dropped";
        SliceOfSliceStart "slice-of-slice-start" ["slice_slice"]: "a slice of a slice forgets where the first one begins";
        OtherElement "other-element" ["get_of_list"]: "an element of a list is its neighbour, where that has the same type";
        ComparedAsIntegers "compared-as-integers" ["decompose"]: "integers are compared with floats as integers";
        SummandReplaced "summand-replaced" ["accumulate"]: "what is scattered into the other summand replaces it instead of being added";
    }
    "rewrite" {
        ScatterForgetsBase "scatter-forgets-base": "a scatter of one element a line replaces what it should be added to";
        ArgminIsArgmax "argmin-is-argmax": "the place of the smallest element is that of the largest";
    }
    "lower" {
        ShortLoopDropped "short-loop-dropped": "an outer loop of two steps is dropped as if it had one";
        SliceStepIgnored "slice-step-ignored": "a slice with a step takes neighbouring elements";
        ScanForwards "scan-forwards": "a scan from the end runs from the beginning";
        PaddingCounted "padding-counted": "an average counts the padding that it should leave out";
        CumprodPanics "cumprod-panics" Panic: "lowering a running product panics";
    }
    "fuse" {
        TransposedRow "transposed-row": "tensors of a list that lie in different orders are walked side by side";
        WriteTooEarly "write-too-early": "an input is overwritten while other steps have yet to read it";
        PermuteIsReshape "permute-is-reshape": "a permuted result is stored as it lay before";
        WindowFirst "window-first": "what surrounds a window may be written after the window";
        CatOverlaps "cat-overlaps": "joined tensors begin one row too early, over the end of the one before";
    }
    "memory" {
        InPlaceElsewhere "in-place-elsewhere": "a result takes the place of an operand that is still read at other elements";
        LivesTooShort "lives-too-short" Caught: "temporaries give up their memory one step before they are read for the last time";
        TemporariesTooLarge "temporaries-too-large" Memory: "temporaries take a thousand times their size";
    }
    "schedule" {
        FirstChunkRepeated "first-chunk-repeated": "a long reduction that is cut into chunks adds up the first one again and again";
    }
    "c" {
        TemporariesOverlap "temporaries-overlap": "temporaries begin 64 bytes too early, inside of their neighbours";
        BuffersSwapped "buffers-swapped": "the first two buffers of a kernel are exchanged, where they hold the same type";
        MaximumFromZero "maximum-from-zero": "a maximum begins at 0 instead of −∞";
        TailNotMasked "tail-not-masked": "a sum takes in the lanes behind the end of the last vector";
        IntegersSubtractedBackwards "integers-subtracted-backwards": "integers are subtracted the wrong way round";
        TrueIsMinusOne "true-is-minus-one": "truth values become 0 and −1 when they are converted to integers";
        UnknownFunction "unknown-function" Refused: "a kernel calls a function that is not there";
        MissingSemicolon "missing-semicolon" Refused: "a statement of a running sum ends without a semicolon";
        NullStore "null-store" Crash: "a kernel over lists writes through a null pointer";
        EndlessLoop "endless-loop" Hang: "a running sum goes through the same rows again and again";
    }
    "codec" {
        ConstantReadBack "constant-read-back": "a constant of a plan comes back from the cache as another number";
        OperationReadBack "operation-read-back": "a maximum comes back from the cache as a minimum";
    }
    "general" {
        CountFrozen "count-frozen": "what a mean divides by stays that of the size that a template was drawn for";
        ExtentFrozen "extent-frozen": "the outermost loop of a kernel stays as long as in the template";
    }
    "call" {
        TransposeOverlooked "transpose-overlooked": "a transposed operand of a product is taken as if it lay row by row";
        StrideOverlooked "stride-overlooked": "a convolution moves by single pixels whatever its stride";
        SortedBackwards "sorted-backwards": "a sort that is a step of a plan runs in the other direction";
        StreamRestarts "stream-restarts": "every random tensor begins at the start of the stream";
    }
    "threads" {
        ItemTwice "item-twice": "the parts that threads run overlap by an item";
        ItemSkipped "item-skipped": "the parts that threads run leave out the item between them";
    }
}

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

impl std::str::FromStr for Fault {
    type Err = crate::Error;

    fn from_str(text: &str) -> crate::Result<Fault> {
        Fault::ALL.iter().copied().find(|fault| fault.name() == text).ok_or_else(|| crate::Error::Option {
            option: "KILN_PLANT",
            value: text.into(),
            valid: Fault::ALL.iter().map(|fault| fault.name()).collect::<Vec<_>>().join(", "),
        })
    }
}

#[cfg(not(feature = "planted"))]
mod active {
    use super::Fault;

    /// Whether a fault is planted: never, without the feature.
    #[inline(always)]
    pub const fn planted(_: Fault) -> bool {
        false
    }

    /// The fault that is planted: none, without the feature.
    pub const fn planted_fault() -> Option<Fault> {
        None
    }
}

#[cfg(feature = "planted")]
mod active {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

    use super::Fault;

    /// No fault is planted here; the environment may name one.
    const NONE: usize = usize::MAX;
    static PLANTED: AtomicUsize = AtomicUsize::new(NONE);
    static TURN: Mutex<()> = Mutex::new(());

    /// The fault that `KILN_PLANT` names.
    fn asked() -> Option<Fault> {
        static ASKED: OnceLock<Option<Fault>> = OnceLock::new();
        *ASKED.get_or_init(|| std::env::var("KILN_PLANT").ok()?.parse().ok())
    }

    /// The fault that is planted in this process.
    pub fn planted_fault() -> Option<Fault> {
        Fault::ALL.get(PLANTED.load(Ordering::Relaxed)).copied().or_else(asked)
    }

    /// Whether a fault is planted.
    pub fn planted(fault: Fault) -> bool {
        planted_fault() == Some(fault)
    }

    /// Plants a fault in the whole process for as long as the guard lives. Faults are planted one at a time: whoever
    /// plants another waits.
    pub fn plant(fault: Fault) -> Planted {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        PLANTED.store(fault as usize, Ordering::SeqCst);
        Planted { _turn: turn }
    }

    /// A planted fault; it is gone when this is dropped.
    #[must_use = "the fault is gone when this is dropped"]
    pub struct Planted {
        _turn: MutexGuard<'static, ()>,
    }

    impl Drop for Planted {
        fn drop(&mut self) {
            PLANTED.store(NONE, Ordering::SeqCst);
        }
    }
}

pub use active::*;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_their_own_and_parse_back() {
        for (i, fault) in Fault::ALL.iter().enumerate() {
            assert_eq!(*fault as usize, i);
            assert_eq!(fault.name().parse::<Fault>().unwrap(), *fault);
            assert!(fault.name().chars().all(|c| c.is_ascii_lowercase() || c == '-'), "{fault}");
            assert_eq!(fault.rule().is_some(), fault.stage() == "prims", "{fault}");
        }
        assert!("some-fault".parse::<Fault>().is_err());
    }
}
