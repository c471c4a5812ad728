// Bracketed trees, one per line, as in the Stanford Sentiment Treebank: (3 (2 fine) (2 weather)).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

struct Tree {
  int64_t label = 0;
  int64_t word = -1;  // only for a leaf: its index in the vocabulary
  std::unique_ptr<Tree> left, right;

  bool is_leaf() const { return left == nullptr; }
};

struct Treebank {
  std::vector<std::unique_ptr<Tree>> trees;
  std::unordered_map<std::string, int64_t> vocabulary;
};

// Throws std::runtime_error with the line's number if the file can't be read.
Treebank read_treebank(const std::string& path);
