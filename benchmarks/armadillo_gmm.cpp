// Armadillo's part in benchmarks/speed.py: prints when a shorter and a longer fit began and ended.
// Armadillo stops when the likelihood stays the same, so each iteration is a call of its own.

#include <armadillo>
#include <chrono>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

static arma::vec read(const std::string& path, std::size_t offset, std::size_t count) {
    arma::vec values(count);
    std::ifstream file(path, std::ios::binary);
    file.seekg(offset);
    file.read(reinterpret_cast<char*>(values.memptr()), count * sizeof(double));
    if (!file) throw std::runtime_error("cannot read " + path);
    return values;
}

template <typename Values>
static void write(std::ofstream& file, const Values& values) {
    file.write(reinterpret_cast<const char*>(values.memptr()), values.n_elem * sizeof(double));
}

// In seconds, and the same everywhere on the machine: Linux's CLOCK_MONOTONIC.
static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

template <typename Model, typename Covariances>
static void run(const arma::mat& rows, const arma::rowvec& weights, const arma::mat& means,
                const Covariances& start, const std::vector<int>& lengths, double floor,
                const Covariances& (*covariances)(const Model&), const std::string& fitted) {
    Model model;
    for (std::size_t fit = 0; fit < lengths.size(); ++fit) {
        model.set_params(means, start, weights);
        const double began = now();
        for (int iteration = 0; iteration < lengths[fit]; ++iteration)
            if (!model.learn(rows, weights.n_elem, arma::eucl_dist, arma::keep_existing, 0, 1, floor, false))
                throw std::runtime_error("the fit failed");
        if (fit > 0) std::cout << began << " " << now() << "\n";
    }
    std::ofstream file(fitted, std::ios::binary);
    write(file, model.hefts);
    write(file, model.means);
    write(file, covariances(model));
}

int main(int, char** arguments) {
    const std::string type = arguments[1], start = arguments[4], fitted = arguments[5];
    const std::size_t offset = std::stoul(arguments[3]), n = std::stoul(arguments[6]);
    const std::size_t d = std::stoul(arguments[7]), k = std::stoul(arguments[8]);
    const int shorter = std::stoi(arguments[9]), longer = std::stoi(arguments[10]);
    const double floor = std::stod(arguments[11]);
    const std::vector<int> lengths = {shorter, shorter, longer};
    const arma::mat rows = arma::reshape(arma::mat(read(arguments[2], offset, n * d)), d, n);
    const arma::rowvec weights = read(start, 0, k).t();
    const arma::mat means = arma::reshape(arma::mat(read(start, k * sizeof(double), k * d)), d, k);
    const std::size_t after = (k + k * d) * sizeof(double);
    std::cout.precision(17);
    if (type == "full") {
        const arma::vec values = read(start, after, k * d * d);
        const arma::cube covariances(values.memptr(), d, d, k);
        run<arma::gmm_full, arma::cube>(
            rows, weights, means, covariances, lengths, floor,
            [](const arma::gmm_full& model) -> const arma::cube& { return model.fcovs; }, fitted);
    } else {
        const arma::mat covariances = arma::reshape(arma::mat(read(start, after, k * d)), d, k);
        run<arma::gmm_diag, arma::mat>(
            rows, weights, means, covariances, lengths, floor,
            [](const arma::gmm_diag& model) -> const arma::mat& { return model.dcovs; }, fitted);
    }
}
