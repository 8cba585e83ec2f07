// An engine in C++ on a running system: the C API with owners for what has to be given back.
//
//     c++ -std=c++17 engine.cpp -o engine $(python -m smoe_mp.cflags)
//     smoe-mp up my-model.smoe --name mine &
//     ./engine mine 5 3 17 42          ring, layer, experts
//
// What it "computes" is the sum of each expert's bytes.
#include <smoe.h>

#include <cstdint>
#include <iostream>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

struct Error : std::runtime_error {
    Error(const smoe_ring *ring, const smoe_error &error) : std::runtime_error(words(ring, error)) {
    }
    static std::string words(const smoe_ring *ring, const smoe_error &error) {
        char text[512];
        smoe_error_text(ring, &error, text, sizeof text);
        return text;
    }
};

class Ring {
  public:
    explicit Ring(const char *name) {
        smoe_error error{};
        smoe_ring *ring = nullptr;
        if (smoe_attach(name, SMOE_ROLE_CLIENT, 0, "engine.cpp", &ring, &error) < 0)
            throw Error(nullptr, error);
        ring_.reset(ring);
    }
    smoe_ring *get() const {
        return ring_.get();
    }

  private:
    struct Detach {
        void operator()(smoe_ring *ring) const {
            smoe_detach(ring);
        }
    };
    std::unique_ptr<smoe_ring, Detach> ring_;
};

// Experts that are held until the batch goes.
class Batch {
  public:
    Batch(const Ring &ring, std::int64_t layer, const std::vector<std::int64_t> &experts)
        : ring_(ring.get()), holds_(experts.size()) {
        smoe_error error{};
        hits = smoe_fetch(ring_, layer, experts.data(), size(), holds_.data(), -1, &error);
        if (hits < 0)
            throw Error(ring_, error);
    }
    ~Batch() {
        smoe_release(ring_, holds_.data(), size());
    }
    Batch(const Batch &) = delete;
    std::uint32_t size() const {
        return static_cast<std::uint32_t>(holds_.size());
    }
    std::uint64_t sum(std::size_t i) const {
        auto slot = static_cast<const std::uint8_t *>(smoe_slot_data(ring_, holds_[i].slot));
        std::vector<smoe_part> parts(16);
        parts.resize(static_cast<std::size_t>(smoe_expert_parts(ring_, holds_[i].expert_index, parts.data(), 16)));
        std::uint64_t sum = 0;
        for (const smoe_part &part : parts)
            for (std::uint64_t k = 0; k < part.bytes; k++)
                sum += slot[part.offset + k];
        return sum;
    }
    int hits = 0;

  private:
    smoe_ring *ring_;
    std::vector<smoe_hold> holds_;
};

int main(int argc, char **argv) try {
    if (argc < 4)
        throw std::invalid_argument("usage: engine RING LAYER EXPERT...");
    std::vector<std::int64_t> experts;
    for (int i = 3; i < argc; i++)
        experts.push_back(std::stoll(argv[i]));
    Ring ring(argv[1]);
    Batch batch(ring, std::stoll(argv[2]), experts);
    std::cout << batch.hits << " of " << batch.size() << " were there\n";
    for (std::size_t i = 0; i < experts.size(); i++)
        std::cout << "expert " << experts[i] << ": " << batch.sum(i) << "\n";
    return 0;
} catch (const std::exception &error) {
    std::cerr << "engine: " << error.what() << "\n";
    return 1;
}
