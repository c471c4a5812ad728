"""The workloads, with one file for each family."""

from benchmarks.workload import Workload
from benchmarks.workloads.bag_of_words import BagOfSentences, BagOfWords
from benchmarks.workloads.experts import Experts
from benchmarks.workloads.free import FreeTreeGeneration
from benchmarks.workloads.generation import TreeGeneration
from benchmarks.workloads.graphs import GraphClassifier
from benchmarks.workloads.greedy import GreedyParser
from benchmarks.workloads.lattice import LatticeLSTM
from benchmarks.workloads.matrix_vector import MatrixVector
from benchmarks.workloads.modules import NeuralModules
from benchmarks.workloads.parser import TransitionParser
from benchmarks.workloads.tagger import CharacterTagger, GatesTagger, Tagger
from benchmarks.workloads.trees import BinaryTrees, SentencePairs

WORKLOADS: dict[str, type[Workload]] = {
    workload.name: workload
    for workload in (
        BagOfWords,
        BagOfSentences,
        Tagger,
        GatesTagger,
        CharacterTagger,
        BinaryTrees,
        SentencePairs,
        TransitionParser,
        Experts,
        NeuralModules,
        MatrixVector,
        TreeGeneration,
        LatticeLSTM,
        GreedyParser,
        FreeTreeGeneration,
        GraphClassifier,
    )
}
