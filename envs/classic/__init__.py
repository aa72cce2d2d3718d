"""Control with continuous states.

Rules, constants, rewards and time limits of cart-pole, pendulum, acrobot and both mountain cars are those of Gymnasium
1.3 (`gymnasium/envs/classic_control`), in whatever precision the state has: float32 from `init`. Every constant is a
parameter, and every transition but for its clips is differentiable.

| file | environments |
| --- | --- |
| `cart_pole.py` | CartPole-v1 |
| `pendulum.py` | Pendulum-v1 |
| `acrobot.py` | Acrobot-v1 |
| `mountain_car.py` | MountainCar-v0, MountainCarContinuous-v0 |
| `double_pole.py` | two poles on one cart, neuroevolution's benchmark |
| `swing_up.py` | a differentiable swing-up, and a point mass |
| `integrator.py` | the Runge-Kutta step of the last two |
"""
