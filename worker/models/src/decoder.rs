//! Weights of a decoder: their structure, common to checkpoints and devices, and their tensors in a
//! checkpoint.

use std::cell::RefCell;
use std::collections::BTreeSet;

use super::foreign_tensors;
use super::{Error, ModelConfig, ModelDir, Tensor, Tensors};

/// Matrix of a decoder layer, or its LM head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Matrix {
    /// Query, key and value projections.
    Qkv,
    /// Output projection of attention.
    Output,
    /// Gate and up projections.
    GateUp,
    /// Down projection.
    Down,
    /// LM head.
    Head,
}

/// Weights of a decoder layer, generic over vectors (`V`) and linear layers (`L`): tensors in files, or
/// weights on a device.
pub struct DecoderLayer<V, L> {
    /// RMSNorm before attention.
    pub attention_norm: V,
    /// Stacked query, key and value projections.
    pub qkv: L,
    /// RMSNorm of query heads and of key heads (QK-norm), if the model has it.
    pub qk_norm: Option<(V, V)>,
    /// Output projection of attention.
    pub output: L,
    /// RMSNorms behind attention and MLP, if the model has them.
    pub post_norms: Option<(V, V)>,
    /// RMSNorm before the MLP.
    pub mlp_norm: V,
    /// Stacked gate and up projections.
    pub gate_up: L,
    /// Down projection.
    pub down: L,
}

impl<V, L> DecoderLayer<V, L> {
    /// Linear layers in the order of the forward pass.
    pub fn linears(&self) -> [&L; 4] {
        [&self.qkv, &self.output, &self.gate_up, &self.down]
    }

    /// Converts vectors and linear layers, in the order of the forward pass.
    ///
    /// # Errors
    /// The first error of `vector` or `linear`.
    pub fn try_map<W, M, E>(
        &self,
        vector: impl Fn(&V) -> Result<W, E>,
        mut linear: impl FnMut(&L) -> Result<M, E>,
    ) -> Result<DecoderLayer<W, M>, E> {
        Ok(DecoderLayer {
            attention_norm: vector(&self.attention_norm)?,
            qkv: linear(&self.qkv)?,
            qk_norm: match &self.qk_norm {
                Some((q, k)) => Some((vector(q)?, vector(k)?)),
                None => None,
            },
            output: linear(&self.output)?,
            post_norms: match &self.post_norms {
                Some((attention, mlp)) => Some((vector(attention)?, vector(mlp)?)),
                None => None,
            },
            mlp_norm: vector(&self.mlp_norm)?,
            gate_up: linear(&self.gate_up)?,
            down: linear(&self.down)?,
        })
    }
}

/// Linear layer in a checkpoint: matrices that are stacked by rows to one GEMM operand, with their biases.
pub struct StackedLinear {
    /// Role of the stacked matrices in the model.
    pub matrix: Matrix,
    /// Matrices [outputs, inputs], all with the same inputs.
    pub matrices: Vec<Tensor>,
    /// Biases of the matrices; empty if it has none.
    pub biases: Vec<Tensor>,
}

impl StackedLinear {
    /// Inputs of the stacked matrices.
    pub fn inputs(&self) -> usize {
        self.matrices[0].shape[1]
    }

    /// Outputs of all matrices together.
    pub fn outputs(&self) -> usize {
        self.matrices.iter().map(|matrix| matrix.shape[0]).sum()
    }
}

/// Decoder layer in a checkpoint.
pub type CheckpointLayer = DecoderLayer<Tensor, StackedLinear>;

/// Tensors of a decoder in the checkpoint, all present and of the expected shape.
pub struct CheckpointDecoder {
    /// Embedding [vocabulary, hidden].
    pub embedding: Tensor,
    /// Layers, first to last.
    pub layers: Vec<CheckpointLayer>,
    /// RMSNorm before the LM head.
    pub norm: Tensor,
    /// LM head [vocabulary, hidden]; `None` if it is tied to the embedding.
    pub head: Option<Tensor>,
}

impl ModelDir {
    /// Looks up every tensor of the decoder under the names of its architecture.
    ///
    /// # Errors
    /// A tensor is missing, has another shape or an unsupported encoding, or the checkpoint has tensors that the decoder does not use.
    pub fn decoder(&self) -> Result<CheckpointDecoder, Error> {
        let lookup = Lookup { config: self.config(), tensors: self.tensors(), used: RefCell::default() };
        match lookup.decoder() {
            Ok(decoder) => lookup.check_all_used().map(|()| decoder),
            Err(error) => Err(lookup.foreign().unwrap_or(error)),
        }
    }
}

/// Beginnings of names of a language model's tensors, alone and in a multimodal model.
const WRAPPED_PREFIXES: [(&str, &str); 3] = [
    ("model.", "model.language_model."),
    ("model.", "language_model.model."),
    ("lm_head", "language_model.lm_head"),
];

/// Lookup of a decoder's tensors, with the names of those that it uses.
struct Lookup<'a> {
    config: &'a ModelConfig,
    tensors: &'a Tensors,
    used: RefCell<BTreeSet<String>>,
}

impl Lookup<'_> {
    fn get(&self, name: String, shape: &[usize]) -> Result<Tensor, Error> {
        let name = self.name_in_file(name);
        let tensor = self.tensors.get(&name, shape)?;
        self.used.borrow_mut().insert(name);
        Ok(tensor)
    }

    /// Returns the name of a tensor in the checkpoint, which differs in multimodal ones.
    fn name_in_file(&self, name: String) -> String {
        if !self.config.architecture.is_multimodal() {
            return name;
        }
        let wrapped = WRAPPED_PREFIXES
            .iter()
            .filter_map(|(plain, prefix)| Some(format!("{prefix}{}", name.strip_prefix(plain)?)));
        let mut found = wrapped.filter(|wrapped| self.tensors.contains(wrapped));
        match self.tensors.contains(&name) {
            true => name,
            false => found.next().unwrap_or(name),
        }
    }

    fn decoder(&self) -> Result<CheckpointDecoder, Error> {
        let (config, names) = (self.config, self.config.architecture.spec().tensors);
        let matrix =
            |name: &str| self.get(format!("{name}.weight"), &[config.vocab_size, config.hidden_size]);
        Ok(CheckpointDecoder {
            embedding: matrix(names.embedding)?,
            layers: (0..config.layers.len()).map(|index| self.layer(index)).collect::<Result<_, Error>>()?,
            norm: self.get(format!("{}.weight", names.norm), &[config.hidden_size])?,
            head: match config.tied_embeddings {
                true => None,
                false => Some(matrix(names.head)?),
            },
        })
    }

    /// Looks up the tensors of layer `index`.
    fn layer(&self, index: usize) -> Result<CheckpointLayer, Error> {
        let config = self.config;
        let names = config.architecture.spec().tensors;
        let ModelConfig { hidden_size: hidden, intermediate_size: inner, head_dim, .. } = *config;
        let (queries, keys) = (config.heads * head_dim, config.kv_heads * head_dim);
        let at = format!("{}.{index}", names.layers);
        let norm = |name: &str, width: usize| self.get(format!("{at}.{name}.weight"), &[width]);
        let linear = |matrix: Matrix, parts: &[(&str, usize)], inputs: usize, has_bias: bool| {
            let mut linear = StackedLinear { matrix, matrices: Vec::new(), biases: Vec::new() };
            for (name, outputs) in parts {
                linear.matrices.push(self.get(format!("{at}.{name}.weight"), &[*outputs, inputs])?);
                if has_bias {
                    linear.biases.push(self.get(format!("{at}.{name}.bias"), &[*outputs])?);
                }
            }
            Ok::<_, Error>(linear)
        };
        let [q, k, v] = names.qkv;
        let [gate, up] = names.gate_up;
        Ok(CheckpointLayer {
            attention_norm: norm(names.attention_norm, hidden)?,
            qkv: linear(Matrix::Qkv, &[(q, queries), (k, keys), (v, keys)], hidden, config.qkv_bias)?,
            qk_norm: match (config.qk_norm, names.qk_norm) {
                (true, [q, k]) => Some((norm(q, head_dim)?, norm(k, head_dim)?)),
                (false, _) => None,
            },
            output: linear(Matrix::Output, &[(names.output, hidden)], queries, config.output_bias)?,
            post_norms: match names.post_norms {
                Some([attention, mlp]) => Some((norm(attention, hidden)?, norm(mlp, hidden)?)),
                None => None,
            },
            mlp_norm: norm(names.mlp_norm, hidden)?,
            gate_up: linear(Matrix::GateUp, &[(gate, inner), (up, inner)], hidden, config.mlp_bias)?,
            down: linear(Matrix::Down, &[(names.down, hidden)], inner, config.mlp_bias)?,
        })
    }

    /// Returns the error for the first tensor that no supported architecture has.
    fn foreign(&self) -> Option<Error> {
        let mut foreign =
            self.tensors.names().filter_map(|name| Some((name, foreign_tensors::format(name)?)));
        foreign.next().map(|(name, kind)| self.unused(name, 1, Some(kind)))
    }

    /// Checks that the decoder uses every tensor, apart from those without effect.
    fn check_all_used(&self) -> Result<(), Error> {
        let used = self.used.borrow();
        let unused = |name: &&str| !used.contains(*name) && !foreign_tensors::is_ignored(name, self.config);
        let unused: Vec<&str> = self.tensors.names().filter(unused).collect();
        match unused.first() {
            None => Ok(()),
            Some(first) => Err(self.unused(first, unused.len(), foreign_tensors::kind(first))),
        }
    }

    fn unused(&self, tensor: &str, count: usize, kind: Option<&'static str>) -> Error {
        let architecture = self.config.architecture.name();
        let count = if count == 1 { "a tensor".to_owned() } else { format!("{count} tensors, the first") };
        Error::UnusedTensor {
            file: self.tensors.file_of(tensor),
            tensor: tensor.to_owned(),
            count,
            architecture,
            kind: kind.unwrap_or("a model of another kind, or with more layers, than its configuration says"),
        }
    }
}
