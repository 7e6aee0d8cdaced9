//! Weights of a decoder: their structure, common to checkpoints and devices, and their tensors in a
//! checkpoint.

use std::cell::RefCell;
use std::collections::BTreeSet;

use super::architecture::{DeltaNames, MtpNames};
use super::foreign_tensors;
use super::{AttentionSpec, DeltaForm, DeltaSpec, Error, Mixer, ModelConfig, ModelDir, Tensor, Tensors};

/// Matrix of a decoder layer, or its LM head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Matrix {
    /// Query, key and value projections.
    Qkv,
    /// Output projection of attention.
    Output,
    /// Projection to the inputs of a recurrent layer's convolution.
    DeltaInputs,
    /// Projection to the gates of its outputs.
    DeltaGates,
    /// Projections to its betas and decays, a number a head.
    DeltaScalars,
    /// Its output projection.
    DeltaOutput,
    /// Projection of the next token's embedding and the last hidden state to the inputs of an MTP layer.
    MtpInputs,
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
    /// RMSNorm before the mixer.
    pub mixer_norm: V,
    /// What mixes tokens.
    pub mixer: MixerWeights<V, L>,
    /// RMSNorms behind mixer and MLP, if the model has them.
    pub post_norms: Option<(V, V)>,
    /// RMSNorm before the MLP.
    pub mlp_norm: V,
    /// Stacked gate and up projections.
    pub gate_up: L,
    /// Down projection.
    pub down: L,
}

/// Weights of what mixes the tokens of a sequence.
pub enum MixerWeights<V, L> {
    /// Attention.
    Attention(AttentionWeights<V, L>),
    /// Gated delta rule.
    Delta(DeltaWeights<V, L>),
}

/// Weights of attention.
pub struct AttentionWeights<V, L> {
    /// Stacked query, key and value projections.
    pub qkv: L,
    /// RMSNorm of query heads and of key heads (QK-norm), if the model has it.
    pub qk_norm: Option<(V, V)>,
    /// Output projection.
    pub output: L,
}

/// Weights of the gated delta rule; shapes and values as in a checkpoint, from which a runtime may make others.
pub struct DeltaWeights<V, L> {
    /// Projection to the inputs of the convolution: queries, keys and values.
    pub inputs: L,
    /// Projection to the gates of the outputs.
    pub gates: L,
    /// Stacked projections to betas and to the inputs of decays.
    pub scalars: L,
    /// Weights of the convolution; [channels, taps], with an axis of 1 between them in checkpoints.
    pub convolution: V,
    /// Rates of decays, as [`DeltaForm`] says; [value_heads].
    pub decay: V,
    /// What is added to the inputs of decays; [value_heads].
    pub decay_bias: V,
    /// RMSNorm of the outputs of a head, whose weights are never zero-centred.
    pub norm: V,
    /// Output projection.
    pub output: L,
}

/// Weights of a layer of multi-token prediction (MTP): it predicts the token after the next one from the last hidden state and the
/// embedding of the next token, `head(norm(layer(inputs([norm(embedding); norm(hidden)]))))`.
pub struct MtpLayer<V, L> {
    /// RMSNorm of the next token's embedding.
    pub embedding_norm: V,
    /// RMSNorm of the last hidden state, which is that before the LM head.
    pub hidden_norm: V,
    /// Projection [hidden, 2 hidden].
    pub inputs: L,
    /// Decoder layer, with attention.
    pub layer: DecoderLayer<V, L>,
    /// RMSNorm before the LM head, which is the model's.
    pub norm: V,
}

impl<V, L> MtpLayer<V, L> {
    /// Linear layers in the order of the forward pass.
    pub fn linears(&self) -> Vec<&L> {
        std::iter::once(&self.inputs).chain(self.layer.linears()).collect()
    }

    /// Converts vectors and linear layers, in the order of the forward pass.
    ///
    /// # Errors
    /// The first error of `vector` or `linear`.
    pub fn try_map<W, M, E>(
        &self,
        vector: impl Fn(VectorKind, &V) -> Result<W, E>,
        mut linear: impl FnMut(&L) -> Result<M, E>,
    ) -> Result<MtpLayer<W, M>, E> {
        Ok(MtpLayer {
            embedding_norm: vector(VectorKind::Norm, &self.embedding_norm)?,
            hidden_norm: vector(VectorKind::Norm, &self.hidden_norm)?,
            inputs: linear(&self.inputs)?,
            layer: self.layer.try_map(&vector, &mut linear)?,
            norm: vector(VectorKind::Norm, &self.norm)?,
        })
    }
}

/// Kind of a vector.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VectorKind {
    /// Weights of an RMSNorm, zero-centred if [`Arithmetic::zero_centred_norms`](crate::Arithmetic::zero_centred_norms) says so.
    Norm,
    /// Numbers as they are.
    Plain,
}

impl<V, L> DecoderLayer<V, L> {
    /// Linear layers in the order of the forward pass.
    pub fn linears(&self) -> Vec<&L> {
        let mut linears = match &self.mixer {
            MixerWeights::Attention(attention) => vec![&attention.qkv, &attention.output],
            MixerWeights::Delta(delta) => vec![&delta.inputs, &delta.gates, &delta.scalars, &delta.output],
        };
        linears.extend([&self.gate_up, &self.down]);
        linears
    }

    /// Returns the weights of attention; `None` of a recurrent layer.
    pub fn attention(&self) -> Option<&AttentionWeights<V, L>> {
        match &self.mixer {
            MixerWeights::Attention(attention) => Some(attention),
            MixerWeights::Delta(_) => None,
        }
    }

    /// Converts vectors and linear layers, in the order of the forward pass.
    ///
    /// # Errors
    /// The first error of `vector` or `linear`.
    pub fn try_map<W, M, E>(
        &self,
        vector: impl Fn(VectorKind, &V) -> Result<W, E>,
        mut linear: impl FnMut(&L) -> Result<M, E>,
    ) -> Result<DecoderLayer<W, M>, E> {
        let norm = |norm: &V| vector(VectorKind::Norm, norm);
        let plain = |numbers: &V| vector(VectorKind::Plain, numbers);
        Ok(DecoderLayer {
            mixer_norm: norm(&self.mixer_norm)?,
            mixer: match &self.mixer {
                MixerWeights::Attention(attention) => MixerWeights::Attention(AttentionWeights {
                    qkv: linear(&attention.qkv)?,
                    qk_norm: match &attention.qk_norm {
                        Some((q, k)) => Some((norm(q)?, norm(k)?)),
                        None => None,
                    },
                    output: linear(&attention.output)?,
                }),
                MixerWeights::Delta(delta) => MixerWeights::Delta(DeltaWeights {
                    inputs: linear(&delta.inputs)?,
                    gates: linear(&delta.gates)?,
                    scalars: linear(&delta.scalars)?,
                    convolution: plain(&delta.convolution)?,
                    decay: plain(&delta.decay)?,
                    decay_bias: plain(&delta.decay_bias)?,
                    norm: plain(&delta.norm)?,
                    output: linear(&delta.output)?,
                }),
            },
            post_norms: match &self.post_norms {
                Some((mixer, mlp)) => Some((norm(mixer)?, norm(mlp)?)),
                None => None,
            },
            mlp_norm: norm(&self.mlp_norm)?,
            gate_up: linear(&self.gate_up)?,
            down: linear(&self.down)?,
        })
    }
}

/// Linear layer in a checkpoint: matrices that are stacked by rows to one GEMM operand, with their biases.
pub struct StackedLinear {
    /// Role of the stacked matrices in the model.
    pub matrix: Matrix,
    /// Matrices [outputs, inputs], all with the same inputs. A fused one has rows of other linear layers, too.
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

/// MTP layer in a checkpoint.
pub type CheckpointMtp = MtpLayer<Tensor, StackedLinear>;

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

    /// Returns whether the checkpoint has an MTP layer that can draft.
    pub fn has_mtp(&self) -> bool {
        let (config, names) = (self.config(), self.config().architecture.spec().mtp);
        let in_file = |names: &MtpNames| self.tensors().contains(&format!("{}.weight", names.inputs));
        config.mtp_layers == 1 && !config.mtp_embedding && names.is_some_and(in_file)
    }

    /// Looks up the tensors of the MTP layer; `None` if [`ModelDir::has_mtp`] says that there is none.
    ///
    /// # Errors
    /// A tensor is missing, has another shape or an unsupported encoding.
    pub fn mtp(&self) -> Result<Option<CheckpointMtp>, Error> {
        let lookup = Lookup { config: self.config(), tensors: self.tensors(), used: RefCell::default() };
        let names = self.config().architecture.spec().mtp.filter(|_| self.has_mtp());
        names.map(|names| lookup.mtp(names)).transpose()
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
            layers: config
                .layers
                .iter()
                .enumerate()
                .map(|(index, layer)| self.layer(&format!("{}.{index}", names.layers), layer.mixer))
                .collect::<Result<_, Error>>()?,
            norm: self.get(format!("{}.weight", names.norm), &[config.hidden_size])?,
            head: match config.tied_embeddings {
                true => None,
                false => Some(matrix(names.head)?),
            },
        })
    }

    /// Looks up the tensors of the MTP layer.
    fn mtp(&self, names: &MtpNames) -> Result<CheckpointMtp, Error> {
        let width = self.config.hidden_size;
        let norm = |name: &str| self.get(format!("{name}.weight"), &[width]);
        Ok(CheckpointMtp {
            inputs: StackedLinear {
                matrix: Matrix::MtpInputs,
                matrices: vec![self.get(format!("{}.weight", names.inputs), &[width, 2 * width])?],
                biases: Vec::new(),
            },
            embedding_norm: norm(names.embedding_norm)?,
            hidden_norm: norm(names.hidden_norm)?,
            layer: self.layer(names.layer, Mixer::Attention(AttentionSpec::FULL))?,
            norm: norm(names.norm)?,
        })
    }

    /// Looks up the tensors of a layer, whose names begin with `at`.
    fn layer(&self, at: &str, mixer: Mixer) -> Result<CheckpointLayer, Error> {
        let config = self.config;
        let names = config.architecture.spec().tensors;
        let ModelConfig { hidden_size: hidden, intermediate_size: inner, head_dim, .. } = *config;
        let (queries, keys) = (config.heads * head_dim, config.kv_heads * head_dim);
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
        let delta = |delta: DeltaSpec| {
            let (names, at) = (DeltaNames::QWEN, |name: &str| format!("{at}.{name}"));
            let DeltaSpec { value_heads, value_dim, taps, .. } = delta;
            let (channels, values) = (delta.channels(), delta.values());
            let inputs = |matrix, part: (&str, usize)| linear(matrix, &[part], hidden, false);
            let [fused, fused_scalars] = names.fused;
            let is_fused = delta.form == DeltaForm::Fused;
            // Each of both linear layers takes its rows of the fused matrix.
            let (inputs_in, gates_in) = match is_fused {
                true => ((fused, channels + values), (fused, channels + values)),
                false => ((names.inputs, channels), (names.gates, values)),
            };
            let scalars: &[(&str, usize)] = match is_fused {
                true => &[(fused_scalars, 2 * value_heads)],
                false => &[(names.beta, value_heads), (names.decay_input, value_heads)],
            };
            let convolution = format!("{}.weight", at(names.convolution));
            Ok::<_, Error>(DeltaWeights {
                inputs: inputs(Matrix::DeltaInputs, inputs_in)?,
                gates: inputs(Matrix::DeltaGates, gates_in)?,
                scalars: linear(Matrix::DeltaScalars, scalars, hidden, false)?,
                convolution: match delta.form {
                    DeltaForm::Checkpoint | DeltaForm::Fused => {
                        self.get(convolution, &[channels, 1, taps])?
                    }
                    DeltaForm::Gguf => self.get(convolution, &[channels, taps])?,
                },
                decay: self.get(at(names.decay), &[value_heads])?,
                decay_bias: self.get(at(names.decay_bias), &[value_heads])?,
                norm: norm(names.norm, value_dim)?,
                output: linear(Matrix::DeltaOutput, &[(names.output, hidden)], values, false)?,
            })
        };
        let gated = if config.arithmetic.output_gate { 2 } else { 1 };
        let attention = || {
            let qkv = [(q, gated * queries), (k, keys), (v, keys)];
            Ok::<_, Error>(AttentionWeights {
                qkv: linear(Matrix::Qkv, &qkv, hidden, config.qkv_bias)?,
                qk_norm: match (config.qk_norm, names.qk_norm) {
                    (true, [q, k]) => Some((norm(q, head_dim)?, norm(k, head_dim)?)),
                    (false, _) => None,
                },
                output: linear(Matrix::Output, &[(names.output, hidden)], queries, config.output_bias)?,
            })
        };
        let mixer = match (mixer, config.delta) {
            (Mixer::Delta, Some(spec)) => MixerWeights::Delta(delta(spec)?),
            _ => MixerWeights::Attention(attention()?),
        };
        Ok(CheckpointLayer {
            mixer_norm: norm(names.mixer_norm, hidden)?,
            mixer,
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
