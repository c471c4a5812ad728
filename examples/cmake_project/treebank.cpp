#include "treebank.h"

#include <cctype>
#include <fstream>
#include <stdexcept>
#include <string_view>

namespace {

class Parser {
 public:
  Parser(std::string_view text, std::unordered_map<std::string, int64_t>& vocabulary)
      : text_(text), vocabulary_(vocabulary) {}

  std::unique_ptr<Tree> parse_line() {
    std::unique_ptr<Tree> tree = parse();
    skip_space();
    if (at_ != text_.size()) throw std::runtime_error("text after the tree");
    return tree;
  }

 private:
  std::unique_ptr<Tree> parse() {
    expect('(');
    auto tree = std::make_unique<Tree>();
    tree->label = std::stoll(token());
    if (peek() == '(') {
      tree->left = parse();
      tree->right = parse();
    } else {
      const auto next = static_cast<int64_t>(vocabulary_.size());
      tree->word = vocabulary_.try_emplace(token(), next).first->second;
    }
    expect(')');
    return tree;
  }

  void skip_space() {
    while (at_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[at_]))) ++at_;
  }

  char peek() {
    skip_space();
    if (at_ == text_.size()) throw std::runtime_error("the tree is cut short");
    return text_[at_];
  }

  void expect(char wanted) {
    if (peek() != wanted) throw std::runtime_error(std::string("expected a '") + wanted + "'");
    ++at_;
  }

  std::string token() {
    skip_space();
    const size_t begin = at_;
    while (at_ < text_.size() && text_[at_] != '(' && text_[at_] != ')' &&
           !std::isspace(static_cast<unsigned char>(text_[at_]))) {
      ++at_;
    }
    if (at_ == begin) throw std::runtime_error("expected a label or a word");
    return std::string(text_.substr(begin, at_ - begin));
  }

  std::string_view text_;
  std::unordered_map<std::string, int64_t>& vocabulary_;
  size_t at_ = 0;
};

}  // namespace

Treebank read_treebank(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw std::runtime_error(path + " can't be opened");
  Treebank bank;
  std::string line;
  for (size_t number = 1; std::getline(file, line); ++number) {
    if (line.empty()) continue;
    try {
      bank.trees.push_back(Parser(line, bank.vocabulary).parse_line());
    } catch (const std::exception& error) {
      throw std::runtime_error(path + ":" + std::to_string(number) + ": " + error.what());
    }
  }
  if (bank.trees.empty()) throw std::runtime_error(path + " has no trees");
  return bank;
}
